"""Conversions among eps, x0, v and flow are round trips, and impossible ones are refused."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.diffusion.prediction import convert, error_ratio, require_invertible, target, to_x0_and_noise
from megadiff.diffusion.schedule import SCHEDULES, NoiseSchedule, make_schedule
from megadiff.errors import ConfigError

PREDICTIONS = ("eps", "x0", "v", "flow")


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


def test_every_schedule_takes_every_prediction_but_eps_at_pure_noise() -> None:
    for name, zero_end, prediction in itertools.product(SCHEDULES, (False, True), PREDICTIONS):
        if name == "flow" and zero_end:
            continue
        schedule = make_schedule(name, 1000, zero_terminal_snr=zero_end)
        if prediction == "eps" and float(schedule.alpha[-1]) == 0.0:
            with pytest.raises(ConfigError, match="alpha = 0"):
                require_invertible(prediction, schedule)
        else:
            require_invertible(prediction, schedule)


@pytest.mark.parametrize("zero_end", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trips_at_every_timestep(name: str, zero_end: bool) -> None:
    """Within 1e-14 max(1 / alpha, 1 / sigma), at least 1e-12, where both predictions can be inverted."""
    schedule = make_schedule(name, 1000, zero_terminal_snr=zero_end and name != "flow")
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 1000, 8, generator=generator, dtype=torch.float64)
    alpha, sigma = schedule.alpha[:, None], schedule.sigma[:, None]
    x_t = alpha * x0 + sigma * noise
    limit = (1e-14 * torch.maximum(1 / alpha, 1 / sigma)).clamp(min=1e-12)
    for source, via in itertools.product(PREDICTIONS, PREDICTIONS):
        rows = slice(None, -1) if "eps" in (source, via) and float(schedule.alpha[-1]) == 0 else slice(None)
        level = (x_t[rows], alpha[rows], sigma[rows])
        start = target(source, x0[rows], noise[rows], *level[1:])
        back = convert(convert(start, source, via, *level), via, source, *level)
        assert bool(((back - start).abs() <= limit[rows] * start.abs().clamp(min=1)).all()), (source, via)


def test_flow_is_the_derivative_of_x_t_along_its_line() -> None:
    schedule = make_schedule("flow", 10)
    x0, noise, *_ = draw(1.0, 4)
    expected = float(schedule.d_alpha[3]) * x0 + float(schedule.d_sigma[3]) * noise
    torch.testing.assert_close(target("flow", x0, noise, schedule.alpha[3], schedule.sigma[3]), expected)


@given(prediction=st.sampled_from(PREDICTIONS), angle=st.floats(0.1, 1.4), seed=st.integers(0, 100))
def test_the_ratio_of_errors_is_that_of_converted_answers(prediction: str, angle: float, seed: int) -> None:
    x0, other, x_t, alpha, sigma = draw(angle, seed)
    errors = convert(other, "x0", prediction, x_t, alpha, sigma) - convert(x0, "x0", prediction, x_t, alpha, sigma)
    expected = errors.square().sum() / (other - x0).square().sum()
    assert float(error_ratio(prediction, alpha, sigma)) == pytest.approx(float(expected), rel=1e-9)


def test_an_unknown_prediction_is_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(ConfigError, match="use eps, x0, v or flow"):
        target("score", x, x, x, x)
    with pytest.raises(ConfigError, match="use eps, x0, v or flow"):
        to_x0_and_noise("score", x, x, x, x)
