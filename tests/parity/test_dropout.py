"""B12, B13: dropout masks are equal where ranks hold the same activations and different where they do not.

Recomputation replays them, and a pipeline draws what one process draws.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.config.schema import Config
from megadiff.models import layers
from megadiff.models.dropout import Dropout
from tests.parity.jobs import pieces_of, ready_engine, train_one_step
from tests.parity.networks import DIT, UNET, changed, parity_config
from tests.parity.outcome import Piece, assemble, largest_difference
from tests.pool import WorkerPool

DROPOUT = DIT.model_copy(update={"dropout": 0.5, "attention_dropout": 0.5})
UNET_DROPOUT = UNET.model_copy(update={"dropout": 0.5, "attention_dropout": 0.5})
FOLDED = {"pipeline": 2, "accumulation": 4}
RESIDUAL, ATTENTION = "residual", "attention"


@dataclass
class Masks:
    """The masks that a rank drew in one step, in order, by kind."""

    drawn: dict[str, list[Tensor]] = field(default_factory=lambda: {RESIDUAL: [], ATTENTION: []})

    def watch(self, network: nn.Module) -> None:
        """Notes the masks of residual dropouts; an activation is never exactly zero by chance."""
        for module in network.modules():
            if type(module) is Dropout:
                module.register_forward_hook(lambda _, x, y: self.drawn[RESIDUAL].append(y.detach() != 0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, backend: str = "auto") -> Tensor:
        """Attention written out, so that its mask can be noted."""
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        kept = F.dropout(torch.ones_like(weights), dropout)
        self.drawn[ATTENTION].append(kept.detach() != 0)
        return (weights * kept) @ v


def draw_masks(config: Config, steps: list[int]) -> list[dict[str, list[Tensor]]]:
    """The masks of some steps, each trained on an engine that was just built."""
    found = []
    original = layers.attend
    for step in steps:
        engine, masks = ready_engine(config), Masks()
        engine.steps, engine.samples = step, step * config.train.global_batch_size
        masks.watch(engine.chain)
        layers.attend = masks.attend
        train_one_step(engine, step)
        layers.attend = original
        found.append(masks.drawn)
    return found


def draw_masks_in_a_row(config: Config, num_steps: int) -> list[dict[str, list[Tensor]]]:
    """The masks of consecutive steps of one engine."""
    engine, original, found = ready_engine(config), layers.attend, []
    for step in range(num_steps):
        masks = Masks()
        masks.watch(engine.chain)
        layers.attend = masks.attend
        train_one_step(engine, step)
        layers.attend = original
        found.append(masks.drawn)
    return found


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """True if all masks are equal; False if all differ; anything between is an error."""
    equal = {torch.equal(a, b) for a, b in zip(some, others, strict=True)}
    assert len(equal) == 1, "some masks are equal and some are not"
    return equal.pop()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_b12_masks_are_equal_where_they_must_and_different_elsewhere(
    pools: Mapping[int, WorkerPool], sequence_parallel: bool, recompute: str
) -> None:
    config = parity_config(
        tensor=2,
        accumulation=1,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        model=DROPOUT,
    )
    ranks = pools[4].run(draw_masks, config=config, steps=[0, 1, 1])
    tensor_pair, data_pair = (0, 1), (0, 2)  # ranks are data x tensor
    for kind in (RESIDUAL, ATTENTION):
        first = [rank[0][kind] for rank in ranks]
        per_layer = 2 if kind == RESIDUAL else 1
        passes = 1 if recompute == "none" else 2
        assert len(first[0]) == DROPOUT.num_layers * per_layer * passes
        assert same(first[tensor_pair[0]], first[tensor_pair[1]]) is (kind == RESIDUAL and not sequence_parallel)
        assert same(first[data_pair[0]], first[data_pair[1]]) is False
        for rank in ranks:
            assert same(rank[0][kind], rank[1][kind]) is False, "another step"
            assert same(rank[1][kind], rank[2][kind]) is True, "the same step after a rebuild"
            drawn = rank[0][kind][: DROPOUT.num_layers * per_layer]
            assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2)), "layers"
            assert all(0.3 < mask.float().mean() < 0.7 for mask in drawn)


@pytest.mark.parametrize("settings", [{}, {"tensor": 2, "sequence_parallel": True}], ids=["1", "tp2+sp"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_b12_recomputation_draws_the_masks_again(
    pools: Mapping[int, WorkerPool], settings: dict[str, object], recompute: str
) -> None:
    config = parity_config(recompute=recompute, model=DROPOUT, accumulation=1, **settings)
    config = changed(config, train={"activation_checkpoint_every_blocks": 1})
    for rank in pools[2 if settings else 1].run(draw_masks, config=config, steps=[0]):
        for kind, per_layer in ((RESIDUAL, 2), (ATTENTION, 1)):
            masks = rank[0][kind]
            half = DROPOUT.num_layers * per_layer
            blocks = [masks[start : start + per_layer] for start in range(half, 2 * half, per_layer)]
            again = [mask for block in reversed(blocks) for mask in block]  # the last block comes first
            assert same(masks[:half], again) is True


def test_b12_a_rebuilt_engine_draws_what_the_uninterrupted_one_drew(pools: Mapping[int, WorkerPool]) -> None:
    config = parity_config(model=DROPOUT)
    (straight,) = pools[1].run(draw_masks_in_a_row, config=config, num_steps=3)
    (rebuilt,) = pools[1].run(draw_masks, config=config, steps=[2])
    for kind in (RESIDUAL, ATTENTION):
        assert same(straight[2][kind], rebuilt[0][kind]) is True


def train_with_dropout(config: Config) -> tuple[float, list[Piece]]:
    """Loss and gradients of one step."""
    engine = ready_engine(config)
    result = train_one_step(engine, 0)
    return float(result.loss), pieces_of(engine, lambda shard: engine.shards.optimizer_state(shard, "exp_avg"))


def gradients(pool: WorkerPool, config: Config) -> dict[str, Tensor]:
    """Full gradients of one step on a pool."""
    reports = pool.run(train_with_dropout, config=config)
    return assemble([piece for report in reports for piece in report[1]])


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {"model": DROPOUT}),
        (2, {"model": DROPOUT, "pipeline": 2}),
        (2, {"model": DROPOUT, "tensor": 2}),
        (2, {"model": DROPOUT, "tensor": 2, "sequence_parallel": True}),
        (1, {"model": UNET_DROPOUT}),
        (2, {"model": UNET_DROPOUT, "tensor": 2}),
        (2, {"model": UNET_DROPOUT, **FOLDED}),
        (2, {"model": UNET_DROPOUT, "pipeline": 2, "schedule": "1f1b"}),
    ],
    ids=["1 process", "pp2", "tp2", "tp2+sp", "UNet", "UNet tp2", "UNet pp2 folded", "UNet pp2 1f1b"],
)
def test_b13_checkpointing_gives_bit_equal_gradients(
    pools: Mapping[int, WorkerPool], world_size: int, settings: dict[str, object]
) -> None:
    pool = pools[world_size]
    expected = gradients(pool, parity_config(**settings))
    for recompute, every in (("full", 1), ("full", 3), ("selective", 2)):
        config = parity_config(recompute=recompute, every=every, **settings)
        found = gradients(pool, config)
        assert all(torch.equal(found[name], expected[name]) for name in expected), (recompute, every)


@pytest.mark.parametrize(
    ("settings", "single"),
    [
        ({"pipeline": 2, "model": DROPOUT}, {"model": DROPOUT}),
        ({"zero_stage": 0, "accumulation": 1, "model": DROPOUT}, {"model": DROPOUT}),
        ({"zero_stage": 2, "accumulation": 1, "model": DROPOUT}, {"model": DROPOUT}),
        ({**FOLDED, "model": UNET_DROPOUT}, {"accumulation": 4, "model": UNET_DROPOUT}),
        ({"pipeline": 2, "schedule": "1f1b", "model": UNET_DROPOUT}, {"model": UNET_DROPOUT}),
    ],
    ids=["pp2", "dp2", "zero2", "UNet pp2 folded", "UNet pp2 1f1b"],
)
def test_b13_equal_micro_batches_draw_equal_masks_on_every_layout(
    pools: Mapping[int, WorkerPool], settings: dict[str, Any], single: dict[str, Any]
) -> None:
    """Micro-batches of as many samples, as many of them, on one process or on two."""
    expected = gradients(pools[1], parity_config(**single))
    found = gradients(pools[2], parity_config(**settings))
    assert largest_difference(found, expected)[0] < 1e-5
    still = single["model"].model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
    without = gradients(pools[1], parity_config(**{**single, "model": still}))
    assert largest_difference(without, expected)[0] > 0.01, "dropout is at work"
