"""Min-SNR weights: the three predictions are one loss (B01), and every weight is finite (B02)."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.diffusion.prediction import convert
from megadiff.diffusion.schedule import SCHEDULES, make_schedule
from megadiff.diffusion.weighting import WEIGHTINGS, loss_weights
from megadiff.errors import ConfigError

PREDICTIONS = ("eps", "x0", "v")


def test_b01_min_snr_weight_of_v_on_the_stable_diffusion_schedule() -> None:
    snr = make_schedule("scaled_linear", 1000).snr
    weights = loss_weights("min_snr", "v", snr, 5.0)
    assert float(weights[999]) == pytest.approx(0.00466, abs=5e-6)
    assert float(weights[500]) == pytest.approx(0.276, abs=5e-4)


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    t=st.integers(0, 999),
    gamma=st.floats(0.1, 50.0),
    seed=st.integers(0, 1000),
)
def test_b01_weighted_losses_agree_after_conversion(schedule: str, t: int, gamma: float, seed: int) -> None:
    """For any output of the network, read as x0 and converted: the same number, whatever the prediction."""
    tables = make_schedule(schedule, 1000)
    alpha, sigma = tables.alpha[t], tables.sigma[t]
    generator = torch.Generator().manual_seed(seed)
    x0, noise, output = torch.randn(3, 2, 3, 4, 4, generator=generator, dtype=torch.float64)
    x_t = alpha * x0 + sigma * noise
    losses = {}
    for prediction in PREDICTIONS:
        answer = convert(output, "x0", prediction, x_t, alpha, sigma)
        truth = convert(x0, "x0", prediction, x_t, alpha, sigma)
        weight = loss_weights("min_snr", prediction, tables.snr[t], gamma)
        losses[prediction] = float(weight * (answer - truth).square().sum())
    expected = float(tables.snr[t].clamp(max=gamma) * (output - x0).square().sum())
    for prediction in PREDICTIONS:
        assert losses[prediction] == pytest.approx(expected, rel=1e-10)


def test_b02_every_pair_is_finite_at_every_timestep() -> None:
    for schedule, name, prediction in itertools.product(SCHEDULES, WEIGHTINGS, PREDICTIONS):
        weights = loss_weights(name, prediction, make_schedule(schedule, 1000).snr, 5.0)
        assert weights.shape == (1000,)
        assert bool(weights.isfinite().all()) and bool((weights > 0).all())


def test_b02_eps_at_zero_snr_is_refused_and_v_is_not() -> None:
    snr = torch.tensor([4.0, 0.0], dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"loss_weight = min_snr .*prediction = eps .*prediction = v"):
        loss_weights("min_snr", "eps", snr, 5.0)
    assert loss_weights("min_snr", "v", snr, 5.0).tolist() == [0.8, 0.0]


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_uniform_is_one(prediction: str) -> None:
    snr = make_schedule("cosine", 10).snr
    assert torch.equal(loss_weights("uniform", prediction, snr, 5.0), torch.ones_like(snr))


def test_unknown_names_are_refused() -> None:
    snr = torch.ones(1)
    with pytest.raises(ConfigError, match="use one of uniform, min_snr"):
        loss_weights("p2", "v", snr, 5.0)
    with pytest.raises(ConfigError, match="not defined for prediction = flow"):
        loss_weights("min_snr", "flow", snr, 5.0)
