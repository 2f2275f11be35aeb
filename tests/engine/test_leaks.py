"""B39: memory stays flat over steps, log lines, picture grids and saves, and a closed engine frees all of it."""

import ctypes
import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from megadiff.config.schema import Config
from megadiff.data.batch import Batch
from megadiff.engine import trainer
from megadiff.engine.engine import Engine, StepResult
from megadiff.engine.monitor import Monitor
from tests.engine.runs import RUN_SECONDS, checkpoints, tiny_config
from tests.parity.jobs import ready_engine, this_process, train_one_step
from tests.parity.networks import parity_config
from tests.pool import WorkerPool

EARLY, LATE = 50, 200


@dataclass(frozen=True)
class Usage:
    """What is alive at a step: tensors that the garbage collector knows, their bytes, resident memory."""

    tensors: int
    tensor_bytes: int
    resident_bytes: int


def usage() -> Usage:
    """Of this process, after a collection; freed memory goes back to the system first."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in alive)
    return Usage(len(alive), num_bytes, psutil.Process().memory_info().rss)


def train_and_measure(config: Config, run_dir: Path) -> dict[int, Usage]:
    """The job for the pool: usage after the early and the late step of a real run."""
    measured: dict[int, Usage] = {}
    end_step = Monitor.end_step

    def measuring(monitor: Monitor, step: int, result: StepResult) -> None:
        end_step(monitor, step, result)
        if step in (EARLY, LATE):
            measured[step] = usage()

    with mock.patch.object(Monitor, "end_step", measuring):
        trainer.train(config, run_dir, None, this_process())
    return measured


def test_b39_memory_is_flat(pools: Mapping[int, WorkerPool], tmp_path: Path) -> None:
    """Both steps are log steps, after which no result waits to be written; five grids and saves lie in between."""
    config = tiny_config(
        train__steps=LATE + 1,
        data__num_samples=64,
        monitor__log_every_steps=10,
        monitor__tensorboard=True,
        monitor__sample_every_steps=30,
        checkpoint__save_every_steps=30,
        checkpoint__keep_last=2,
    )
    (measured,) = pools[1].run(train_and_measure, RUN_SECONDS, config=config, run_dir=tmp_path)
    assert len(list((tmp_path / "samples").iterdir())) >= 5
    assert checkpoints(tmp_path) == ["latest", "step_00000180", "step_00000201"]
    early, late = measured[EARLY], measured[LATE]
    assert early.tensors > 50
    assert abs(late.tensors - early.tensors) < 0.01 * early.tensors, (early, late)
    assert abs(late.tensor_bytes - early.tensor_bytes) < 0.01 * early.tensor_bytes, (early, late)
    assert late.resident_bytes - early.resident_bytes < 0.01 * early.resident_bytes, (early, late)


def alive_after_close(config: Config) -> list[str]:
    """The job for the pool: what of an engine that took a step is still there after it was closed."""
    engine = ready_engine(config)
    train_one_step(engine, 0)
    things = {"engine": engine, "network": engine.chain, "optimizer": engine.deepspeed.optimizer}
    references = {name: weakref.ref(thing) for name, thing in things.items()}
    engine.close()
    del engine, things
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize(
    "settings",
    [
        *({"zero_stage": stage} for stage in range(4)),
        {"pipeline": 2},
        {"pipeline": 2, "accumulation": 4, "schedule": "folded"},
        {"pipeline": 2, "zero_stage": 1},
    ],
    ids=str,
)
def test_b39_a_closed_engine_leaves_nothing(pools: Mapping[int, WorkerPool], settings: dict[str, Any]) -> None:
    assert pools[2].run(alive_after_close, config=parity_config(**settings)) == [[], []]


def train_and_count(config: Config, run_dir: Path) -> list[int]:
    """The job for the pool: how many engines are alive at each step."""
    counts: list[int] = []
    train_step = Engine.train_step

    def counting(engine: Engine, micro_batches: Sequence[Batch]) -> StepResult:
        counts.append(sum(type(item) is Engine for item in gc.get_objects()))
        return train_step(engine, micro_batches)

    with mock.patch.object(Engine, "train_step", counting):
        trainer.train(config, run_dir, None, this_process())
    return counts


def test_b39_a_finished_stage_leaves_memory(pools: Mapping[int, WorkerPool], tmp_path: Path) -> None:
    config = tiny_config(
        model__input_size=8,
        train__steps=6,
        optimizer__warmup_steps=2,
        train__progressive=True,
        train__stages=[{"until": 0.5, "input_size": 4}, {"until": 1.0, "input_size": 8}],
        parallel__zero_stage=3,
    )
    counts = pools[2].run(train_and_count, RUN_SECONDS, config=config, run_dir=tmp_path)
    assert counts == [[1] * 6] * 2
