"""Rates by path, clipping now and then, and Lion: as on one process, on every kind of layout."""

from collections.abc import Mapping

import pytest

from megadiff.config.schema import Config, ModelConfig
from tests.parity.jobs import combine, train
from tests.parity.layouts import Layout
from tests.parity.networks import DIT, UNET, changed, parity_config
from tests.parity.outcome import differences
from tests.parity.reference import train_reference
from tests.parity.report import Matrix
from tests.pool import WorkerPool

FOLDED = {"pipeline": 2, "accumulation": 4}
ZERO_3 = Layout("zero3", 2, {"zero_stage": 3})
LAYOUTS = (
    Layout("tp2 x pp2 folded", 4, {**FOLDED, "tensor": 2}),
    Layout("zero1 x tp2", 4, {"tensor": 2, "zero_stage": 1}),
    ZERO_3,
)
# A UNet of random values grows the differences of its weights in later predictions.
LIMITS = {"predict": 1e-4}


def by_path(model: ModelConfig, layout: Mapping[str, object], clip_every: int) -> Config:
    """Clips hard, so that a step that does not clip is another step."""
    config = parity_config(model=model, **layout)
    settings = {"path_lr_ratios": (1.0, 0.5, 0.2), "clip_every_steps": clip_every, "clip_norm": 0.1}
    return changed(config, optimizer=settings)


@pytest.mark.parametrize("clip_every", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_c4_c6_rates_by_path_and_clipping_now_and_then(
    pools: Mapping[int, WorkerPool], parity_matrix: Matrix, layout: Layout, clip_every: int
) -> None:
    config = by_path(UNET, layout.settings, clip_every)
    found = combine(pools[layout.world_size].run(train, config=config, num_steps=3))
    measured = differences(found, train_reference(by_path(UNET, {}, clip_every), 3))
    parity_matrix.record("UNet", f"{layout.name}, path rates, clips every {clip_every}", "fp32", measured)
    assert all(value < LIMITS.get(name, 1e-5) for name, (value, _) in measured.items()), measured


@pytest.mark.parametrize("layout", [Layout("dp2 x tp2", 4, {"tensor": 2}), ZERO_3], ids=lambda layout: layout.name)
def test_c5_lion_takes_the_same_step(pools: Mapping[int, WorkerPool], parity_matrix: Matrix, layout: Layout) -> None:
    """One step only: where a gradient vanishes, the sign of its rounding decides, so that weights part afterwards."""
    config = parity_config(model=DIT, optimizer="lion", **layout.settings)
    found = combine(pools[layout.world_size].run(train, config=config, num_steps=1))
    expected = train_reference(parity_config(model=DIT, optimizer="lion"), 1)
    measured = differences(found, expected)
    parity_matrix.record("DiT", f"{layout.name}, lion", "fp32", measured)
    assert all(measured[name][0] < 1e-5 for name in ("loss", "norm", "gradient")), measured
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        clear = gradient.abs() > 1e-4 * largest
        difference = (found.weights[name] - expected.weights[name])[clear].abs()
        assert difference.numel() == 0 or float(difference.max()) < 1e-7, name
