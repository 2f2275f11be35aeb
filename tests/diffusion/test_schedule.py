"""Schedules against their closed forms, written out with plain floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.diffusion.schedule import SCHEDULES, NoiseSchedule, make_schedule
from megadiff.errors import ConfigError


def abar_in_python(name: str, num: int) -> list[float]:
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


@pytest.mark.parametrize("name", SCHEDULES)
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


@given(name=st.sampled_from(sorted(SCHEDULES)), num=st.integers(1, 2000))
def test_every_timestep_is_finite_noisy_and_monotone(name: str, num: int) -> None:
    schedule = make_schedule(name, num)
    assert schedule.num_train_timesteps == num
    assert schedule.alpha.dtype == schedule.sigma.dtype == torch.float64
    assert bool((schedule.alpha > 0).all()) and bool((schedule.sigma > 0).all())
    assert bool((schedule.alpha.diff() < 0).all()) and bool((schedule.sigma.diff() >= 0).all())
    assert float((schedule.alpha**2 + schedule.sigma**2 - 1.0).abs().max()) < 1e-12
    assert bool(schedule.snr.isfinite().all()) and bool((schedule.snr > 0).all())


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
