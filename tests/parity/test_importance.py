"""Every layout holds the same table of losses and gradient norms, and draws and weighs timesteps by it alike."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megadiff.config.schema import Config, ModelConfig
from megadiff.engine.build import make_objective
from tests.parity.jobs import ready_engine, train_one_step
from tests.parity.layouts import Layout
from tests.parity.networks import DIT, UNET, changed, global_batch, parity_config
from tests.parity.reference import reference_network
from tests.pool import WorkerPool

FORMS = {
    "density": {"importance": "density"},
    "weight": {"importance": "weight"},
    "adaptive": {"timestep_sampling": "adaptive"},
}
FOLDED = {"pipeline": 2, "accumulation": 4}
CELLS = [
    pytest.param(model, layout, form, id=f"{name} {layout.name} {form}")
    for name, model, layout, form in (
        ("DiT", DIT, Layout("dp2", 2), "adaptive"),
        ("DiT", DIT, Layout("tp2+sp", 2, {"tensor": 2, "sequence_parallel": True}), "density"),
        ("DiT", DIT, Layout("pp2", 2, {"pipeline": 2}), "weight"),
        ("DiT", DIT, Layout("zero3, full checkpointing", 2, {"zero_stage": 3, "recompute": "full"}), "density"),
        ("DiT", DIT, Layout("zero1 x pp2", 4, {"pipeline": 2, "zero_stage": 1}), "density"),
        ("UNet", UNET, Layout("tp2 x pp2 folded", 4, {**FOLDED, "tensor": 2}), "density"),
    )
]
NUM_STEPS = 5
LIMIT = 1e-6


def config_of(model: ModelConfig, form: str, layout: Mapping[str, Any], precision: str = "fp32") -> Config:
    """Refits after steps 2 and 4."""
    config = parity_config(model=model, precision=precision, **layout)
    levels = {"num_levels": 5, "refit_from_step": 2, "refit_every_steps": 2}
    return changed(config, diffusion={**levels, **FORMS[form]})


def train_and_tell(config: Config, steps: int) -> tuple[Tensor, Tensor | None, Tensor, list[float]]:
    """The table, the density, the factors and the losses of a rank after some steps."""
    engine = ready_engine(config)
    losses = [float(train_one_step(engine, step).loss) for step in range(steps)]
    importance = engine.objective.importance
    return importance.state(), importance.sampler.density, importance.factors, losses


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs() / expected.abs().clamp(min=1e-12)).max())


@pytest.mark.parametrize(("model", "layout", "form"), CELLS)
def test_every_layout_holds_the_same_table(
    pools: Mapping[int, WorkerPool], model: ModelConfig, layout: Layout, form: str
) -> None:
    plain = {key: value for key, value in layout.settings.items() if key == "accumulation"}
    (one,) = pools[1].run(train_and_tell, config=config_of(model, form, plain), steps=NUM_STEPS)
    reports = pools[layout.world_size].run(
        train_and_tell, config=config_of(model, form, layout.settings), steps=NUM_STEPS
    )
    differences = []
    for table, density, factors, losses in reports:
        differences.append(relative(table, one[0]))
        assert losses == pytest.approx(one[3], rel=1e-5)
        assert relative(factors, one[2]) < 1e-5
        assert (density is None) == (one[1] is None) == (form == "weight")
        if density is not None:
            assert relative(density, one[1]) < 1e-5
        assert torch.equal(table, reports[0][0]), "ranks differ"
    assert max(differences) < LIMIT


@pytest.mark.parametrize("model", [DIT, UNET], ids=["DiT", "UNet"])
def test_the_table_is_that_of_losses_and_gradients_one_by_one(
    pools: Mapping[int, WorkerPool], model: ModelConfig
) -> None:
    """One step on two data ranks in float64 against autograd over each sample of the reference network."""
    config = config_of(model, "density", {}, precision="fp64")
    reports = pools[2].run(train_and_tell, config=config, steps=1)
    objective, network = make_objective(config), reference_network(config)
    batch = global_batch(model, 0)
    inputs = objective.prepare(batch.images.double(), batch.labels, batch.sample_ids, 0)
    expected = torch.zeros(5, 4, dtype=torch.float64)
    last = [p for name, p in network.named_parameters() if name.startswith(("head.out.", "head.conv."))]
    for row in range(len(batch.images)):
        rows = slice(row, row + 1)
        output = network((inputs.x_t[rows], inputs.t[rows], inputs.labels[rows]))
        loss = inputs.weight[row] * (output - inputs.target[rows]).square().mean()
        squared = sum(float(grad.square().sum()) for grad in torch.autograd.grad(loss, last))
        level = int(inputs.t[row]) * 5 // config.diffusion.num_train_timesteps
        expected[level] += torch.tensor([1.0, loss.item(), loss.item() ** 2, squared], dtype=torch.float64)
    for report in reports:
        torch.testing.assert_close(report[0][0], expected, rtol=1e-9, atol=0)
