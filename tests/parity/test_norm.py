"""B10: the global gradient norm counts each logical parameter once, on every layout, and clipping follows it."""

import math
from collections.abc import Mapping

import pytest
import torch

from megadiff.config.schema import Config, ModelConfig
from megadiff.models import build_network
from tests.parity.jobs import pieces_of, ready_engine, train_one_step
from tests.parity.layouts import Layout
from tests.parity.networks import ADAMW, DIT, TEXT_UNET, UNET, parity_config
from tests.parity.outcome import Piece, assemble
from tests.pool import WorkerPool

LAYOUTS = (
    Layout("1 process", 1),
    Layout("tp2", 2, {"tensor": 2}),
    Layout("tp2+sp", 2, {"tensor": 2, "sequence_parallel": True}),
    Layout("pp2", 2, {"pipeline": 2}),
    Layout("zero1", 2, {"zero_stage": 1}),
    Layout("zero2", 2, {"zero_stage": 2}),
    Layout("zero3", 2, {"zero_stage": 3}),
    Layout("tp2 x pp2", 4, {"tensor": 2, "pipeline": 2}),
    Layout("zero1 x tp2", 4, {"tensor": 2, "zero_stage": 1}),
    Layout("zero1 x pp2", 4, {"pipeline": 2, "zero_stage": 1}),
)
FOLDED = {"pipeline": 2, "accumulation": 4}
UNET_LAYOUTS = (
    Layout("tp2", 2, {"tensor": 2}),
    Layout("pp2 1f1b", 2, {**FOLDED, "schedule": "1f1b"}),
    Layout("pp2 folded", 2, FOLDED),
    Layout("zero1 x pp2 folded", 4, {**FOLDED, "zero_stage": 1}),
    Layout("tp2 x pp2 folded", 4, {**FOLDED, "tensor": 2}),
)
TEXT_UNET_LAYOUTS = (Layout("tp2+sp", 2, {"tensor": 2, "sequence_parallel": True}),)
CELLS = [
    pytest.param(model, layout, id=f"{network} {layout.name}")
    for network, model, layouts in (
        ("DiT", DIT, LAYOUTS),
        ("UNet", UNET, UNET_LAYOUTS),
        ("text UNet", TEXT_UNET, TEXT_UNET_LAYOUTS),
    )
    for layout in layouts
]


def train_on_ones(config: Config) -> tuple[float, list[Piece]]:
    """One step whose gradients add up to 1.0 over the micro-batches, whatever the network computes."""
    engine = ready_engine(config)
    share = 1.0 / config.train.gradient_accumulation_steps
    for parameter in engine.chain.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, share))
    result = train_one_step(engine, 0)
    clipped = pieces_of(engine, lambda shard: engine.shards.optimizer_state(shard, "exp_avg"))
    return float(result.grad_norm), clipped


@pytest.mark.parametrize(("model", "layout"), CELLS)
def test_b10_gradients_of_one_have_the_norm_of_their_number(
    pools: Mapping[int, WorkerPool], model: ModelConfig, layout: Layout
) -> None:
    config = parity_config(model=model, **{"accumulation": 1, **layout.settings})
    reports = pools[layout.world_size].run(train_on_ones, config=config)
    norm = math.sqrt(sum(parameter.numel() for parameter in build_network(model, 0).parameters()))
    assert [report[0] for report in reports] == [pytest.approx(norm, rel=1e-5)] * layout.world_size
    clipped = assemble([piece for report in reports for piece in report[1]])
    for name, gradient in clipped.items():
        assert gradient.sub(ADAMW.clip_norm / norm).abs().max() < 1e-5 * ADAMW.clip_norm / norm, name
