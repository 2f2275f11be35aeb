"""Timesteps of a sampler: distinct, falling, and where the papers put them."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.diffusion.schedule import SCHEDULES, make_schedule
from megadiff.errors import ConfigError
from megadiff.sampling.grids import GRIDS, timestep_grid


@given(
    num=st.integers(2, 1200),
    name=st.sampled_from(list(SCHEDULES)),
    grid=st.sampled_from(list(GRIDS)),
    shift=st.sampled_from([1.0, 0.3, 3.0, 50.0]),
    data=st.data(),
)
def test_timesteps_are_distinct_and_fall(num: int, name: str, grid: str, shift: float, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, num))
    timesteps = timestep_grid(grid, make_schedule(name, num), steps, shift)
    assert len(timesteps) == steps and timesteps[0] < num and timesteps[-1] >= 0
    assert all(a > b for a, b in itertools.pairwise(timesteps))
    if grid != "leading":
        assert timesteps[0] == num - 1


@given(num=st.integers(1, 1200), data=st.data())
def test_trailing_timesteps_are_even(num: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, num))
    gaps = [a - b for a, b in itertools.pairwise(timestep_grid("trailing", make_schedule("flow", num), steps))]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_timesteps_of_the_usual_settings() -> None:
    schedule = make_schedule("linear", 1000)
    assert timestep_grid("trailing", schedule, 4) == (999, 749, 499, 249)
    assert timestep_grid("trailing", schedule, 3) == (999, 666, 332)
    assert timestep_grid("trailing", make_schedule("linear", 5), 5) == (4, 3, 2, 1, 0)
    assert timestep_grid("leading", schedule, 4) == (750, 500, 250, 0)
    assert timestep_grid("linspace", schedule, 4) == (999, 666, 333, 0)
    assert timestep_grid("linspace", schedule, 1) == (999,)


@pytest.mark.parametrize("steps", [0, 11])
def test_step_counts_outside_the_schedule_are_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=rf"sampling\.steps = {steps} .*num_train_timesteps = 10"):
        timestep_grid("trailing", make_schedule("linear", 10), steps)


def test_a_shift_moves_time_as_its_formula_says() -> None:
    """Of flow matching: sigma is time, and the noise ratio sigma / alpha grows by the shift."""
    schedule = make_schedule("flow", 1000)
    plain, moved = (schedule.sigma[list(timestep_grid("trailing", schedule, 8, shift))] for shift in (1.0, 3.0))
    torch.testing.assert_close(moved[1:], (3 * plain / (1 + 2 * plain))[1:], rtol=0, atol=1e-3)


def test_the_noise_ratios_of_karras_and_exponential_grids() -> None:
    schedule = make_schedule("scaled_linear", 1000)
    ratios = schedule.sigma / schedule.alpha
    low, high = float(ratios[0]), float(ratios[-1])
    for grid, forward in (("karras", lambda ratio: ratio ** (1 / 7)), ("exponential", math.log)):
        found = ratios[list(timestep_grid(grid, schedule, 6))].tolist()
        strides = [forward(a) - forward(b) for a, b in itertools.pairwise(found)]
        wanted = (forward(high) - forward(low)) / 5
        # The cleanest timesteps are far apart in their ratio, so that the nearest one may be off.
        assert strides[:3] == pytest.approx([wanted] * 3, rel=0.02)
        assert found[0] == high and found[-1] == low


@pytest.mark.parametrize("grid", ["karras", "exponential"])
def test_pure_noise_comes_before_the_noise_ratios(grid: str) -> None:
    schedule = make_schedule("flow", 1000)
    assert timestep_grid(grid, schedule, 1) == (999,)
    assert timestep_grid(grid, schedule, 2) == (999, 998)
    assert timestep_grid(grid, schedule, 5)[:2] == (999, 998) and timestep_grid(grid, schedule, 5)[-1] == 0
