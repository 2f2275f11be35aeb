"""B09: what several ranks hold stays the same on all of them, bit for bit, and a wrong plan would be noticed."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from megadiff.config.schema import Config, ModelConfig
from megadiff.parallel import stage
from megadiff.parallel.plan import Plan
from megadiff.parallel.plans import dit_plan
from tests.parity.jobs import RankReport, combine, pieces_of, ready_engine, train, train_one_step
from tests.parity.layouts import Layout
from tests.parity.networks import changed, parity_config
from tests.parity.outcome import Piece, assemble, differences
from tests.parity.reference import train_reference
from tests.pool import WorkerPool


def train_many(config: Config, num_steps: int) -> list[Piece]:
    """The tensors that this rank's network computes with after some steps."""
    engine = ready_engine(config)
    for step in range(num_steps):
        train_one_step(engine, step)
    return pieces_of(engine, lambda shard: shard.parameter.data.view(-1)[shard.start : shard.stop])


@pytest.mark.parametrize(
    "layout",
    [
        Layout("tp2", 2, {"tensor": 2}),
        Layout("tp2+sp", 2, {"tensor": 2, "sequence_parallel": True}),
        Layout("dp2 x tp2+sp", 4, {"tensor": 2, "sequence_parallel": True}),
        Layout("tp2+sp x pp2", 4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    ],
    ids=lambda layout: layout.name,
)
def test_b09_replicas_are_bit_equal_after_ten_steps(pools: Mapping[int, WorkerPool], layout: Layout) -> None:
    # With this eps, AdamW turns any difference of two replicas' gradients into one of their weights.
    config = changed(parity_config(**layout.settings), optimizer={"eps": 1e-8, "betas": (0.9, 0.99)})
    reports = pools[layout.world_size].run(train_many, config=config, num_steps=10)
    pieces = [piece for report in reports for piece in report]
    held = [piece.name for piece in pieces if piece.size == piece.full_shape]
    assert len(held) >= 2 * len(set(held)) > 0
    assemble(pieces)


def test_a_single_different_bit_in_a_replica_is_noticed() -> None:
    piece = Piece("w", (2, 3), (0, 0), (2, 3), 0, 6, torch.rand(6) + 1)
    other = dataclasses.replace(piece, values=piece.values.clone())
    assemble([piece, other])
    other.values.view(torch.int32)[4] += 1
    with pytest.raises(AssertionError, match="ranks hold different values of w"):
        assemble([piece, other])
    with pytest.raises(AssertionError, match="no rank owns some values"):
        assemble([dataclasses.replace(piece, stop=5, values=piece.values[:5])])


def complete_qk_norms(model: ModelConfig) -> Plan:
    """A wrong plan: it says that the q/k norms' gradients are complete on every rank."""
    plan = dit_plan(model)
    return dataclasses.replace(plan, partial=(), replicated=plan.replicated + plan.partial)


def train_with_wrong_plan(config: Config) -> RankReport:
    """One step under the wrong plan."""
    stage.plan_for, right = complete_qk_norms, stage.plan_for
    try:
        return train(config, 1)
    finally:
        stage.plan_for = right


def test_parity_notices_qk_norms_that_a_plan_calls_complete(pools: Mapping[int, WorkerPool]) -> None:
    """The forward pass is right and only these gradients are wrong; each rank saw its own heads only."""
    config = parity_config(tensor=2)
    reports = pools[2].run(train_with_wrong_plan, config=config)
    norms = [[piece for piece in report.gradients if piece.name.endswith("_norm.weight")] for report in reports]
    assert len(norms[0]) == 2 * config.model.num_layers
    for ours, theirs in zip(*norms, strict=True):
        assert not torch.allclose(ours.values, theirs.values, rtol=0.01)
    with pytest.raises(AssertionError, match="ranks hold different values of blocks"):
        combine(reports)
    measured = differences(combine([reports[0], keep_sharded(reports[1])]), train_reference(parity_config(), 1))
    assert measured["loss"][0] < 1e-5
    assert measured["gradient"][0] > 1e-3 and measured["gradient"][1].endswith("_norm.weight")


def keep_sharded(report: RankReport) -> RankReport:
    """A report without what another rank holds as well."""
    kept = {
        name: [piece for piece in getattr(report, name) if piece.size != piece.full_shape]
        for name in ("gradients", "weights", "averages")
    }
    return dataclasses.replace(report, **kept)
