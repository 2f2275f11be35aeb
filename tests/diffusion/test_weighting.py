"""Min-SNR weights: the three predictions are one loss (B01), and every weight is finite (B02)."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.diffusion.prediction import convert
from megadiff.diffusion.schedule import SCHEDULES, NoiseSchedule, make_schedule
from megadiff.diffusion.weighting import WEIGHTINGS, loss_weights
from megadiff.errors import ConfigError

PREDICTIONS = ("eps", "x0", "v", "flow")


def test_b01_min_snr_weight_of_v_on_the_stable_diffusion_schedule() -> None:
    weights = loss_weights("min_snr", "v", make_schedule("scaled_linear", 1000), 5.0)
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
    tables = make_schedule(schedule, 1001)  # one more, so that flow has signal at every t
    alpha, sigma = tables.alpha[t], tables.sigma[t]
    generator = torch.Generator().manual_seed(seed)
    x0, noise, output = torch.randn(3, 2, 3, 4, 4, generator=generator, dtype=torch.float64)
    x_t = alpha * x0 + sigma * noise
    losses = {}
    for prediction in PREDICTIONS:
        answer = convert(output, "x0", prediction, x_t, alpha, sigma)
        truth = convert(x0, "x0", prediction, x_t, alpha, sigma)
        weight = loss_weights("min_snr", prediction, NoiseSchedule(alpha[None], sigma[None]), gamma)
        losses[prediction] = float(weight * (answer - truth).square().sum())
    expected = float(tables.snr[t].clamp(max=gamma) * (output - x0).square().sum())
    for prediction in PREDICTIONS:
        assert losses[prediction] == pytest.approx(expected, rel=1e-10)


def test_b02_every_pair_is_finite_at_every_timestep_or_refused() -> None:
    for schedule, zero_end, name, prediction in itertools.product(SCHEDULES, (False, True), WEIGHTINGS, PREDICTIONS):
        tables = make_schedule(schedule, 1000, zero_terminal_snr=zero_end and schedule != "flow")
        ends_in_noise = float(tables.alpha[-1]) == 0.0
        if ends_in_noise and prediction == "eps":
            continue  # refused before, see test_prediction
        weights = loss_weights(name, prediction, tables, 5.0)
        assert weights.shape == (1000,)
        assert bool(weights.isfinite().all()) and bool((weights[:-1] > 0).all())
        assert (float(weights[-1]) == 0.0) == (ends_in_noise and name == "min_snr")


def test_b02_eps_at_zero_snr_is_refused_and_v_is_not() -> None:
    ends = torch.tensor([[0.8, 0.0], [0.4, 1.0]], dtype=torch.float64)
    schedule = NoiseSchedule(ends[0], ends[1])
    with pytest.raises(ConfigError, match=r"loss_weight = min_snr .*prediction = eps .*prediction = v"):
        loss_weights("min_snr", "eps", schedule, 5.0)
    assert loss_weights("min_snr", "x0", schedule, 5.0).tolist() == pytest.approx([4.0, 0.0])


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_uniform_is_one(prediction: str) -> None:
    weights = loss_weights("uniform", prediction, make_schedule("cosine", 10), 5.0)
    assert torch.equal(weights, torch.ones(10, dtype=torch.float64))


def test_unknown_names_are_refused() -> None:
    schedule = make_schedule("cosine", 10)
    with pytest.raises(ConfigError, match="use one of uniform, min_snr"):
        loss_weights("p2", "v", schedule, 5.0)
    with pytest.raises(ConfigError, match="prediction = score is unknown"):
        loss_weights("min_snr", "score", schedule, 5.0)
