"""Schedules against their closed forms, written out with plain floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.config.schema import Config
from megadiff.diffusion.schedule import SCHEDULES, NoiseSchedule, make_schedule, schedule_of
from megadiff.errors import ConfigError

KEPT_VARIANCE = [name for name in SCHEDULES if name != "flow"]


def abar_in_python(name: str, num: int) -> list[float]:
    if name == "hybrid":
        powers = [0.3 * u + 0.7 * (1 - math.cos(math.pi * u / 2)) for u in ((t + 1) / num for t in range(num))]
        return [1 - (1e-4 + (1 - 2e-4) * power) for power in powers]
    abar, product = [], 1.0
    for t in range(num):
        fraction = t / (num - 1) if num > 1 else 0.0
        match name:
            case "linear":
                beta = 1e-4 + (0.02 - 1e-4) * fraction
            case "scaled_linear":
                beta = (math.sqrt(0.00085) + (math.sqrt(0.012) - math.sqrt(0.00085)) * fraction) ** 2
            case _:
                before, after = (math.cos((u / num + 0.008) / 1.008 * math.pi / 2) ** 2 for u in (t, t + 1))
                beta = min(1.0 - after / before, 0.999)
        product *= 1.0 - beta
        abar.append(product)
    return abar


@pytest.mark.parametrize("name", KEPT_VARIANCE)
@pytest.mark.parametrize("num", [1, 2, 50, 1000])
def test_tables_equal_the_closed_form(name: str, num: int) -> None:
    schedule = make_schedule(name, num)
    expected = torch.tensor(abar_in_python(name, num), dtype=torch.float64)
    torch.testing.assert_close(schedule.alpha**2, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(schedule.sigma**2, 1.0 - expected, rtol=1e-10, atol=0)


def test_published_end_points() -> None:
    """Values anyone can recompute: scaled-linear ends at abar 0.00466, cosine follows cos^2."""
    assert float(make_schedule("scaled_linear", 1000).alpha[-1] ** 2) == pytest.approx(0.00466, abs=5e-6)
    assert float(make_schedule("linear", 1000).alpha[0] ** 2) == pytest.approx(0.9999, abs=1e-12)
    cosine = make_schedule("cosine", 1000)
    start = math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    middle = math.cos((0.5 + 0.008) / 1.008 * math.pi / 2) ** 2
    assert float(cosine.alpha[499] ** 2) == pytest.approx(middle / start, rel=1e-9)
    assert float(cosine.alpha[999] / cosine.alpha[998]) ** 2 == pytest.approx(0.001, rel=1e-9)


@given(name=st.sampled_from(sorted(KEPT_VARIANCE)), num=st.integers(1, 2000))
def test_every_timestep_is_finite_noisy_and_monotone(name: str, num: int) -> None:
    schedule = make_schedule(name, num)
    assert schedule.num_train_timesteps == num
    assert schedule.alpha.dtype == schedule.sigma.dtype == torch.float64
    assert bool((schedule.alpha > 0).all()) and bool((schedule.sigma > 0).all())
    assert bool((schedule.alpha.diff() < 0).all()) and bool((schedule.sigma.diff() >= 0).all())
    assert float((schedule.alpha**2 + schedule.sigma**2 - 1.0).abs().max()) < 1e-12
    assert bool(schedule.snr.isfinite().all()) and bool((schedule.snr > 0).all())


def test_flow_is_a_straight_line_that_ends_in_noise() -> None:
    schedule = make_schedule("flow", 4)
    assert schedule.alpha.tolist() == [0.75, 0.5, 0.25, 0.0] and schedule.sigma.tolist() == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_a3_hybrid_has_finite_ends_and_its_share_of_the_line(fraction: float) -> None:
    schedule = make_schedule("hybrid", 1000, fraction)
    power = schedule.sigma**2
    assert float(power[-1]) == pytest.approx(1 - 1e-4, abs=1e-12)
    curve = 1 - math.cos(math.pi / 4)
    assert float(power[499]) == pytest.approx(1e-4 + (1 - 2e-4) * (fraction / 2 + (1 - fraction) * curve), abs=1e-12)


@pytest.mark.parametrize("name", KEPT_VARIANCE)
def test_a5_rescaled_schedules_end_in_noise_and_start_as_before(name: str) -> None:
    before, after = make_schedule(name, 1000), make_schedule(name, 1000, zero_terminal_snr=True)
    assert float(after.alpha[-1]) == 0.0 and float(after.sigma[-1]) == 1.0
    assert float(after.alpha[0]) == pytest.approx(float(before.alpha[0]), rel=1e-14)
    assert bool((after.alpha.diff() < 0).all())
    assert float((after.alpha**2 + after.sigma**2 - 1).abs().max()) < 1e-12


def test_b03_the_rescaled_stable_diffusion_schedule() -> None:
    alpha = make_schedule("scaled_linear", 1000, zero_terminal_snr=True).alpha
    assert float(alpha[0] ** 2) == pytest.approx(0.99915, abs=5e-6) and float(alpha[-1]) == 0.0


def test_one_timestep_cannot_be_rescaled() -> None:
    with pytest.raises(ConfigError, match="num_train_timesteps = 1"):
        make_schedule("cosine", 1, zero_terminal_snr=True)


@given(name=st.sampled_from(sorted(SCHEDULES)), shift=st.floats(0.1, 10.0))
def test_a8_a_shift_divides_alpha_over_sigma(name: str, shift: float) -> None:
    plain, moved = make_schedule(name, 50), make_schedule(name, 50, shift=shift)
    torch.testing.assert_close(moved.snr * shift**2, plain.snr, rtol=1e-10, atol=1e-300)
    total = moved.alpha + moved.sigma if name == "flow" else moved.alpha**2 + moved.sigma**2
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)
    if name == "flow":
        u = plain.sigma
        torch.testing.assert_close(moved.sigma, shift * u / (1 + (shift - 1) * u), rtol=1e-12, atol=0)


def test_a8_the_shift_of_a_run_is_the_root_of_its_tokens_over_the_base() -> None:
    settings: dict[str, object] = {"model": {"input_size": 32, "patch_size": 2}, "diffusion": {"schedule": "flow"}}
    settings["diffusion"] = {"schedule": "flow", "shift_base_tokens": 64}
    found = schedule_of(Config.model_validate(settings))
    torch.testing.assert_close(found.sigma, make_schedule("flow", 1000, shift=2.0).sigma)


@pytest.mark.parametrize("name", SCHEDULES)
def test_derivatives_lead_from_one_timestep_to_the_next(name: str) -> None:
    """Their trapezium sum is the table, but for the roots at the ends and the jump where cosine caps beta."""
    num, inner = 1000, slice(20, -20)
    schedule = make_schedule(name, num)
    for table, slope in ((schedule.alpha, schedule.d_alpha), (schedule.sigma, schedule.d_sigma)):
        steps = (slope[1:] + slope[:-1]) / (2 * num)
        torch.testing.assert_close(steps[inner], table.diff()[inner], rtol=1e-3, atol=1e-6)


def test_derivatives_of_a_line_are_exact() -> None:
    schedule = make_schedule("flow", 100)
    torch.testing.assert_close(schedule.d_alpha, -torch.ones(100, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(schedule.d_sigma, torch.ones(100, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_shaped_like_the_samples(dtype: torch.dtype) -> None:
    schedule = make_schedule("cosine", 100)
    t = torch.tensor([0, 99, 7])
    alpha, sigma = schedule.at(t, torch.zeros(3, 4, 2, 2, dtype=dtype))
    assert alpha.shape == sigma.shape == (3, 1, 1, 1)
    assert torch.equal(alpha.flatten(), schedule.alpha[t].to(dtype))
    assert torch.equal(sigma.flatten(), schedule.sigma[t].to(dtype))


def test_snr_is_the_ratio_of_the_powers() -> None:
    schedule = NoiseSchedule(torch.tensor([0.8], dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64))
    assert float(schedule.snr) == pytest.approx(16 / 9)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"diffusion\.schedule = sigmoid.*cosine"):
        make_schedule("sigmoid", 10)
