"""What the processes of the pool run for the parity tests."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.config.layout import resolve_layout
from megadiff.config.schema import Config
from megadiff.dist.process import Process
from megadiff.engine.build import build_engine
from megadiff.engine.engine import Engine, StepResult
from megadiff.parallel.shards import Shard
from tests.parity.networks import GRADIENT_KEYS, give_values, global_batch, micro_batches, probe
from tests.parity.outcome import Outcome, Piece, assemble


@dataclass(frozen=True)
class RankReport:
    """One rank's part of an Outcome."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    gradients: list[Piece]
    weights: list[Piece]
    averages: list[Piece]
    prediction: Tensor
    averaged_prediction: Tensor
    is_restored: bool


def this_process() -> Process:
    """The process of the pool that runs this."""
    return Process(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))


def ready_engine(config: Config) -> Engine:
    """An engine with the values of the parity tests."""
    process = this_process()
    engine = build_engine(config, resolve_layout(config, process.world_size), process)
    give_values(engine)
    return engine


def train_one_step(engine: Engine, step: int) -> StepResult:
    """One step on the parity tests' data."""
    batch = global_batch(engine.config.model, step)
    parts = micro_batches(batch, engine.layout, engine.grid.data.index) if engine.needs_data else []
    return engine.train_step(parts)


def pieces_of(engine: Engine, values_of: Callable[[Shard], Tensor]) -> list[Piece]:
    """What this rank owns of some tensor for each parameter, copies that other ranks own as well included."""
    return [
        Piece(
            name=shard.name,
            full_shape=tuple(shard.full_shape),
            offset=shard.offset,
            size=shard.size,
            start=shard.start,
            stop=shard.stop,
            values=values_of(shard).detach().clone(),
        )
        for shard in engine.shards.all
        if shard.numel
    ]


def train(config: Config, num_steps: int) -> RankReport:
    """Trains a few steps and reports everything that a layout must not change."""
    engine, key = ready_engine(config), GRADIENT_KEYS[config.optimizer.name]
    losses, norms, rates = [], [], []
    gradients: list[Piece] = []
    for step in range(num_steps):
        result = train_one_step(engine, step)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        rates.append(result.lr)
        if step == 0:
            gradients = pieces_of(engine, lambda shard: engine.shards.optimizer_state(shard, key))
    return RankReport(losses, norms, rates, gradients, *_state(engine), *_predictions(engine))


def _state(engine: Engine) -> tuple[list[Piece], list[Piece]]:
    weights = pieces_of(engine, lambda shard: shard.master)
    return weights, pieces_of(engine, lambda shard: engine.ema.values[shard.name])


def _predictions(engine: Engine) -> tuple[Tensor, Tensor, bool]:
    inputs = probe(engine.config)
    before = _memory(engine)
    raw = engine.predict(*inputs)
    with engine.averaged_weights():
        averaged = engine.predict(*inputs)
        is_changed = not _equal(before, _memory(engine))
    return raw, averaged, is_changed and _equal(before, _memory(engine))


def _memory(engine: Engine) -> list[Tensor]:
    """Everything that averaged weights could touch: what the network computes with, and the masters."""
    tensors = [getattr(shard.parameter, "ds_tensor", shard.parameter.data) for shard in engine.shards.all]
    return [tensor.detach().clone() for tensor in tensors + [shard.master for shard in engine.shards.all]]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def combine(reports: list[RankReport]) -> Outcome:
    """One outcome from the reports of all ranks, which must agree where they report the same thing."""
    first = reports[0]
    for report in reports:
        assert (report.losses, report.norms, report.rates) == (first.losses, first.norms, first.rates)
        assert torch.equal(report.prediction, first.prediction)
        assert torch.equal(report.averaged_prediction, first.averaged_prediction)
        assert report.is_restored, "averaged_weights left other weights behind"
    return Outcome(
        losses=first.losses,
        norms=first.norms,
        rates=first.rates,
        gradients=assemble([piece for report in reports for piece in report.gradients]),
        weights=assemble([piece for report in reports for piece in report.weights]),
        averages=assemble([piece for report in reports for piece in report.averages]),
        prediction=first.prediction,
        averaged_prediction=first.averaged_prediction,
    )
