"""What the processes of the pool run to train in half precision."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator

from megadiff.config.layout import resolve_layout
from megadiff.config.schema import Config
from megadiff.engine import build
from megadiff.engine.checkpointing import load_checkpoint, save_checkpoint
from megadiff.engine.engine import Engine
from tests.engine.layout_jobs import FINGERPRINT, SAVED_STEPS, RankState, go_on
from tests.parity.jobs import ready_engine, this_process, train_one_step

OVERFLOW_STEP = 2


@dataclass(frozen=True)
class HalfReport:
    """The losses of the first steps, the dtypes of one rank's tensors, and its state when it saved."""

    losses: list[float]
    network: set[torch.dtype]
    masters: set[torch.dtype]
    averages: set[torch.dtype]
    state: RankState


def train_half(config: Config, root: Path) -> HalfReport:
    """Trains, saves under `root`, trains on."""
    engine = ready_engine(config)
    losses = [float(train_one_step(engine, step).loss) for step in range(SAVED_STEPS)]
    save_checkpoint(engine, root, FINGERPRINT)
    return HalfReport(
        losses=losses,
        network={parameter.dtype for parameter in engine.chain.parameters()},
        masters={shard.master.dtype for shard in engine.shards.all},
        averages={values.dtype for values in engine.ema.values.values()},
        state=go_on(engine),
    )


@dataclass(frozen=True)
class ScaledStep:
    """A step of fp16: the scale after it, and what it changed."""

    loss: float
    applied: bool
    scale: float
    ema_updates: int
    changed_masters: bool
    changed_average: bool


@dataclass(frozen=True)
class ScaleReport:
    """One rank's run in fp16, and the state of its loss scale at the end."""

    first_scale: float
    steps: list[ScaledStep]
    scale_state: dict[str, int | float]
    skipped_steps: int
    network: set[torch.dtype]


def overflow_and_save(config: Config, root: Path, num_steps: int) -> ScaleReport:
    """Trains in fp16 with an infinite gradient on the last rank at one step; saves before the last step."""
    with _fp16_on_cpu():
        engine = _fresh_engine(config)
        first_scale = engine.loss_scale_state()["cur_scale"]
        steps = [_step(engine, step) for step in range(num_steps - 1)]
        save_checkpoint(engine, root, FINGERPRINT)
        return _scale_report(engine, first_scale, [*steps, _step(engine, num_steps - 1)])


def load_and_step(config: Config, folder: Path) -> ScaleReport:
    """Loads what `overflow_and_save` saved and takes the last step."""
    with _fp16_on_cpu():
        engine = _fresh_engine(config)
        load_checkpoint(engine, folder, FINGERPRINT)
        return _scale_report(engine, engine.loss_scale_state()["cur_scale"], [_step(engine, engine.steps)])


@contextlib.contextmanager
def _fp16_on_cpu() -> Iterator[None]:
    """Torch computes fp16 on CPU, slowly; neither DeepSpeed nor we admit it."""
    accelerator = type(get_accelerator())
    supported = mock.patch.object(accelerator, "is_fp16_supported", lambda self: True)
    with supported, mock.patch.object(build, "check_device"):
        yield


def _fresh_engine(config: Config) -> Engine:
    """With the initial weights, whose gradients do not overflow at the first scale."""
    process = this_process()
    return build.build_engine(config, resolve_layout(config, process.world_size), process)


def _step(engine: Engine, step: int) -> ScaledStep:
    masters, average = _copies(engine)
    with _infinite_gradient(engine) if step == OVERFLOW_STEP else contextlib.nullcontext():
        result = train_one_step(engine, step)
    new_masters, new_average = _copies(engine)
    return ScaledStep(
        loss=float(result.loss),
        applied=result.applied,
        scale=engine.loss_scale_state()["cur_scale"],
        ema_updates=engine.ema.num_updates,
        changed_masters=not torch.equal(masters, new_masters),
        changed_average=not torch.equal(average, new_average),
    )


def _copies(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's masters and moving average, each as one tensor."""
    masters = torch.cat([shard.master.detach() for shard in engine.shards.all])
    return masters, torch.cat(list(engine.ema.values.values()))


@contextlib.contextmanager
def _infinite_gradient(engine: Engine) -> Iterator[None]:
    """On the last rank; the others must hear of it."""
    process, parameter = this_process(), engine.chain.get_parameter("head.out.bias")
    is_last = process.rank == process.world_size - 1
    handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, math.inf) if is_last else gradient)
    try:
        yield
    finally:
        handle.remove()


def _scale_report(engine: Engine, first_scale: float, steps: list[ScaledStep]) -> ScaleReport:
    dtypes = {parameter.dtype for parameter in engine.chain.parameters()}
    return ScaleReport(first_scale, steps, engine.loss_scale_state(), engine.skipped_steps, dtypes)
