"""Tiny runs through the real trainer: settings, the job for the pool, and what it reports."""

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megadiff.checkpoint import CheckpointReader
from megadiff.config.load import config_from_dict, config_to_dict
from megadiff.config.schema import Config
from megadiff.data import Batch
from megadiff.engine import trainer
from megadiff.engine.engine import Engine, StepResult
from megadiff.errors import MegadiffError
from tests.parity.jobs import this_process
from tests.pool import WorkerPool

RUN_SECONDS = 400.0  # of one job; other work may have the cores

_TINY: dict[str, dict[str, Any]] = {
    "model": {
        "input_size": 4,
        "patch_size": 2,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "mlp_ratio": 1.5,
        "num_classes": 5,
    },
    "data": {"name": "ids", "num_samples": 37},
    "train": {"steps": 20, "global_batch_size": 4},
    "optimizer": {"lr": 1e-2, "warmup_steps": 8, "weight_decay": 0.1},
    "ema": {"decay": 0.9},
    "sampling": {"steps": 3},
    "checkpoint": {"save_every_steps": 100, "keep_last": 0},
    "monitor": {"sample_every_steps": 0, "tensorboard": False, "samples_per_class": 1},
}


def tiny_config(**changes: Any) -> Config:
    """A run of seconds on pictures that say which sample they are.

    Args:
        changes: dotted keys with `__` for the dot, such as `train__steps=3`.
    """
    return changed(config_from_dict(_TINY), {key.replace("__", "."): value for key, value in changes.items()})


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """A config with other values for some dotted keys, checked as a whole."""
    values = config_to_dict(config)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    return config_from_dict(values)


@dataclass(frozen=True)
class RunReport:
    """What one rank saw of a training run.

    Attributes:
        error: class and message of the error that ended it, "" if it ended well.
        rates: (learning rate, weight decay) of every group, at every step inside the optimizer.
        sample_ids: of every step, in the order in which this rank consumed them.
        indices: the data set entries of the same samples.
        results: loss, gradient norm and rate that every step returned.
        output: what was printed.
    """

    error: str
    rates: list[list[tuple[float, float]]]
    sample_ids: list[list[int]]
    indices: list[list[int]]
    results: list[tuple[float, float, float]] = field(default_factory=list)
    output: str = ""


@dataclass
class _Recorder:
    crash_after: int | None
    rates: list[list[tuple[float, float]]] = field(default_factory=list)
    sample_ids: list[list[int]] = field(default_factory=list)
    indices: list[list[int]] = field(default_factory=list)
    results: list[tuple[float, float, float]] = field(default_factory=list)

    def record_rates(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.rates.append([(group["lr"], group["weight_decay"]) for group in optimizer.param_groups])

    def wrap(self, train_step: Callable[[Engine, list[Batch]], StepResult]) -> Callable[..., StepResult]:
        def recorded(engine: Engine, batches: list[Batch]) -> StepResult:
            if self.crash_after is not None and engine.steps == self.crash_after:
                raise KeyboardInterrupt
            self.sample_ids.append([i for batch in batches for i in batch.sample_ids.tolist()])
            self.indices.append([i for batch in batches for i in batch.indices.tolist()])
            result = train_step(engine, batches)
            self.results.append((float(result.loss), float(result.grad_norm), result.lr))
            return result

        return recorded


def train_run(config: Config, run_dir: Path, resume: str | None = None, crash_after: int | None = None) -> RunReport:
    """Trains and records; the job for the pool.

    Args:
        config, run_dir, resume: see `trainer.train`.
        crash_after: a step after which the run dies, as by Ctrl-C.
    """
    recorder, error, printed = _Recorder(crash_after), "", io.StringIO()
    hook = register_optimizer_step_pre_hook(recorder.record_rates)
    patch = mock.patch.object(Engine, "train_step", recorder.wrap(Engine.train_step))
    try:
        with patch, contextlib.redirect_stdout(printed):
            trainer.train(config, run_dir, resume, this_process())
    except (MegadiffError, KeyboardInterrupt) as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        hook.remove()
    parts = (recorder.rates, recorder.sample_ids, recorder.indices, recorder.results)
    return RunReport(error, *parts, output=printed.getvalue())


def run(pool: WorkerPool, config: Config, run_dir: Path, **arguments: Any) -> RunReport:
    """Trains on a pool; the report of rank 0, after checking that all ranks ended alike."""
    reports = pool.run(train_run, RUN_SECONDS, config=config, run_dir=run_dir, **arguments)
    assert len({report.error for report in reports}) == 1, [report.error for report in reports]
    return reports[0]


def train_well(pool: WorkerPool, config: Config, run_dir: Path, **arguments: Any) -> RunReport:
    """Trains on a pool, which must succeed."""
    report = run(pool, config, run_dir, **arguments)
    assert not report.error, report.error
    return report


def checkpoint(run_dir: Path, step: int) -> Path:
    """The checkpoint folder of a step."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def checkpoints(run_dir: Path) -> list[str]:
    """What lies in the checkpoints folder, `latest` and hidden leftovers included."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by `kind/name`."""
    with CheckpointReader(folder) as reader:
        reader.verify()
        return {f"{kind}/{name}": reader.read(kind, name) for kind in reader.kinds() for name in reader.names(kind)}


def counters(folder: Path) -> dict[str, float]:
    """The counters of a checkpoint."""
    with CheckpointReader(folder) as reader:
        return dict(reader.index.counters)


def assert_same_tensors(found: Path, expected: Path) -> None:
    """Raises unless two checkpoints hold the same tensors bit for bit and the same counters."""
    ours, theirs = stored(found), stored(expected)
    assert ours.keys() == theirs.keys()
    different = [name for name, value in theirs.items() if not torch.equal(ours[name], value)]
    assert not different, different
    assert counters(found) == counters(expected)


def log_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The step log."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def log_steps(run_dir: Path) -> list[int]:
    """The steps in the log, in the order of the file."""
    return [line["step"] for line in log_lines(run_dir)]


@contextlib.contextmanager
def on_rank(rank: int, patch: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Applies a patch on one rank only."""
    with patch if this_process().rank == rank else contextlib.nullcontext():
        yield
