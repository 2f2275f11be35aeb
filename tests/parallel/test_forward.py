"""Predictions do not depend on the layout, whatever the size of the batch."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from megadiff.config.schema import Config
from tests.parity.jobs import ready_engine, train_one_step
from tests.parity.layouts import Layout
from tests.parity.networks import DIT, UNET, parity_config, seeded
from tests.parity.reference import reference_network
from tests.pool import WorkerPool

SIZES = (1, 2, 3, 5)


def inputs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of some size."""
    x_t = torch.randn(size, 3, 8, 8, generator=seeded("inputs", size))
    return x_t, torch.arange(size) * 100, torch.arange(size)


def predict_before_and_after_training(config: Config) -> tuple[list[Tensor], bool]:
    """Predictions of all sizes, and whether the network still trains afterwards."""
    engine = ready_engine(config)
    outputs = [engine.predict(*inputs(size)) for size in SIZES]
    losses = []
    for step in range(2):
        losses.append(float(train_one_step(engine, step).loss))
        engine.predict(*inputs(3))
    return outputs, engine.chain.training and all(loss > 0 for loss in losses)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("1 process", 1),
        Layout("pp2", 2, {"pipeline": 2}),
        Layout("zero3", 2, {"zero_stage": 3}),
        Layout("tp2+sp x pp2", 4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
        Layout("pp4", 4, {"pipeline": 4}),
        Layout("UNet, pp2 1f1b", 2, {"pipeline": 2, "schedule": "1f1b", "model": UNET}),
        Layout("UNet, pp4 folded", 4, {"pipeline": 4, "accumulation": 8, "model": UNET}),
    ],
    ids=lambda layout: layout.name,
)
def test_predictions_of_any_batch_equal_one_process(pools: Mapping[int, WorkerPool], layout: Layout) -> None:
    network = reference_network(parity_config(model=layout.settings.get("model", DIT)))
    with torch.no_grad():
        expected = [network(inputs(size)) for size in SIZES]
    config = parity_config(**{"accumulation": 4, **layout.settings})
    for outputs, is_well in pools[layout.world_size].run(predict_before_and_after_training, config=config):
        assert is_well
        for found, right in zip(outputs, expected, strict=True):
            assert (found - right).abs().max() < 1e-5 * right.abs().max()
