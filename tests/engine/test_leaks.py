"""B39: memory stays flat over steps, log lines, picture grids and saves."""

import ctypes
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import torch

from megadiff.config.schema import Config
from megadiff.engine import trainer
from megadiff.engine.engine import StepResult
from megadiff.engine.monitor import Monitor
from tests.engine.runs import RUN_SECONDS, checkpoints, tiny_config
from tests.parity.jobs import this_process
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
