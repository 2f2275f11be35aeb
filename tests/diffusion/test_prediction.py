"""Conversions among eps, x0 and v are round trips, and impossible ones are refused."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.diffusion.prediction import convert, require_invertible, target, to_x0_and_noise
from megadiff.diffusion.schedule import SCHEDULES, NoiseSchedule, make_schedule
from megadiff.errors import ConfigError

PREDICTIONS = ("eps", "x0", "v")


def draw(angle: float, seed: int) -> tuple[torch.Tensor, ...]:
    """Return x0, noise, x_t, alpha, sigma at a point of the circle alpha^2 + sigma^2 = 1."""
    generator = torch.Generator().manual_seed(seed)
    x0, noise = torch.randn(2, 3, 2, 4, 4, generator=generator, dtype=torch.float64)
    alpha = torch.tensor(angle, dtype=torch.float64).cos()
    sigma = torch.tensor(angle, dtype=torch.float64).sin()
    return x0, noise, alpha * x0 + sigma * noise, alpha, sigma


@given(prediction=st.sampled_from(PREDICTIONS), angle=st.floats(0.01, 1.56), seed=st.integers(0, 100))
def test_target_and_its_inverse_are_a_round_trip(prediction: str, angle: float, seed: int) -> None:
    x0, noise, x_t, alpha, sigma = draw(angle, seed)
    answer = target(prediction, x0, noise, alpha, sigma)
    found_x0, found_noise = to_x0_and_noise(prediction, answer, x_t, alpha, sigma)
    # Division by alpha or sigma >= 0.01 enlarges the rounding of float64 at most a hundredfold.
    torch.testing.assert_close(found_x0, x0, rtol=0, atol=1e-12)
    torch.testing.assert_close(found_noise, noise, rtol=0, atol=1e-12)


@given(angle=st.floats(0.05, 1.52), seed=st.integers(0, 100))
def test_arbitrary_outputs_survive_every_chain_of_conversions(angle: float, seed: int) -> None:
    _, output, x_t, alpha, sigma = draw(angle, seed)
    for source, via in itertools.product(PREDICTIONS, PREDICTIONS):
        there = convert(output, source, via, x_t, alpha, sigma)
        back = convert(there, via, source, x_t, alpha, sigma)
        torch.testing.assert_close(back, output, rtol=1e-10, atol=1e-10)


def test_v_is_the_derivative_of_x_t_along_the_circle() -> None:
    """Salimans and Ho: with alpha = cos(angle), sigma = sin(angle), v is d x_t / d angle."""
    x0, noise, _, alpha, sigma = draw(0.7, 0)
    step = 1e-6
    ahead, behind = draw(0.7 + step, 0)[2], draw(0.7 - step, 0)[2]
    v = target("v", x0, noise, alpha, sigma)
    torch.testing.assert_close(v, (ahead - behind) / (2 * step), rtol=0, atol=1e-8)


def test_eps_and_x0_are_passed_through_untouched() -> None:
    x0, noise, x_t, alpha, sigma = draw(1.0, 3)
    assert to_x0_and_noise("eps", noise, x_t, alpha, sigma)[1] is noise
    assert to_x0_and_noise("x0", x0, x_t, alpha, sigma)[0] is x0
    assert convert(x0, "v", "v", x_t, alpha, sigma) is x0


def endpoint(alpha: float, sigma: float) -> NoiseSchedule:
    values = torch.tensor([[0.8, alpha], [0.6, sigma]], dtype=torch.float64)
    return NoiseSchedule(values[0], values[1])


@pytest.mark.parametrize(
    ("prediction", "schedule", "name"),
    [("eps", endpoint(0.0, 1.0), "alpha"), ("x0", endpoint(1.0, 0.0), "sigma")],
)
def test_b03_divisions_by_zero_are_refused_instead_of_inf(prediction: str, schedule: NoiseSchedule, name: str) -> None:
    with pytest.raises(ConfigError, match=f"prediction = {prediction} .*{name} = 0.*prediction = v"):
        require_invertible(prediction, schedule)
    t = torch.tensor([0, 1])
    x = torch.ones(2, 1, 1, 1, dtype=torch.float64)
    with pytest.raises(ConfigError, match=f"{name} = 0"):
        to_x0_and_noise(prediction, x, x, *schedule.at(t, x))
    found = to_x0_and_noise("v", x, x, *schedule.at(t, x))
    assert all(bool(part.isfinite().all()) for part in found)
    require_invertible("v", schedule)


def test_every_schedule_takes_every_prediction() -> None:
    for name, prediction in itertools.product(SCHEDULES, PREDICTIONS):
        require_invertible(prediction, make_schedule(name, 1000))


def test_an_unknown_prediction_is_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(ConfigError, match="use eps, x0 or v"):
        target("score", x, x, x, x)
    with pytest.raises(ConfigError, match="use eps, x0 or v"):
        to_x0_and_noise("score", x, x, x, x)
