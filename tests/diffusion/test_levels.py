"""The table of losses per noise level against plain sums, and the densities and weights made of it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.diffusion.levels import (
    DENSITIES,
    LevelStatistics,
    Observation,
    adaptive_density,
    bounded,
    gradient_density,
    loss_density,
    published_weights,
)
from megadiff.diffusion.schedule import SCHEDULES, make_schedule

T, LEVELS = 100, 10
ALL = (*DENSITIES.values(), adaptive_density)


def observed(loss_of_level: torch.Tensor, gradient_of_level: torch.Tensor, repeats: int = 3) -> LevelStatistics:
    """A table that has seen every timestep a few times, with these values."""
    statistics = LevelStatistics(LEVELS, T)
    t = torch.arange(T).repeat(repeats)
    level = t // (T // LEVELS)
    statistics.observe(Observation(t, loss_of_level[level], gradient_of_level[level]))
    statistics.refit()
    return statistics


def ramp(start: float, end: float) -> torch.Tensor:
    return torch.linspace(start, end, LEVELS, dtype=torch.float64)


@given(seed=st.integers(0, 1000), num_timesteps=st.integers(7, 60), num_levels=st.integers(1, 7))
def test_sums_are_those_of_each_level(seed: int, num_timesteps: int, num_levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    statistics = LevelStatistics(num_levels, num_timesteps)
    t = torch.randint(num_timesteps, (40,), generator=generator)
    loss, gradient = torch.rand(2, 40, generator=generator, dtype=torch.float64)
    for rows in torch.arange(40).split(8):
        statistics.observe(Observation(t[rows], loss[rows], gradient[rows]))
    for level in range(num_levels):
        mine = torch.tensor([int(x) * num_levels // num_timesteps == level for x in t])
        expected = [mine.sum(), loss[mine].sum(), loss[mine].square().sum(), gradient[mine].sum()]
        assert statistics.sums[level].tolist() == pytest.approx([float(value) for value in expected])


def test_samples_that_are_not_finite_are_left_out() -> None:
    statistics = LevelStatistics(2, 2)
    loss = torch.tensor([1.0, float("inf"), 2.0], dtype=torch.float64)
    gradient = torch.tensor([3.0, 1.0, float("nan")], dtype=torch.float64)
    statistics.observe(Observation(torch.tensor([0, 0, 1]), loss, gradient))
    assert statistics.sums.tolist() == [[1.0, 1.0, 1.0, 3.0], [0.0] * 4]


def test_the_past_fades_by_half_at_each_refit() -> None:
    statistics = observed(ramp(1.0, 1.0), ramp(1.0, 1.0))
    t = torch.arange(T).repeat(3)
    statistics.observe(Observation(t, torch.full((3 * T,), 4.0, dtype=torch.float64), torch.ones(3 * T).double()))
    statistics.refit()
    assert statistics.mean("loss")[0] == pytest.approx((0.5 * 1 + 4) / 1.5)


def test_before_the_first_refit_nothing_is_known() -> None:
    schedule = make_schedule("cosine", T)
    assert all(density(LevelStatistics(LEVELS, T), schedule) is None for density in ALL)


def test_a_level_without_samples_takes_the_mean_of_the_others() -> None:
    statistics = LevelStatistics(2, 10)
    statistics.observe(Observation(torch.tensor([0, 1]), torch.tensor([1.0, 3.0]).double(), torch.ones(2).double()))
    statistics.refit()
    assert statistics.mean("loss").tolist() == [2.0] * 10


def test_second_moment_densities() -> None:
    statistics, schedule = observed(ramp(1.0, 2.0), ramp(4.0, 1.0)), make_schedule("cosine", T)
    level = torch.arange(T) // (T // LEVELS)
    of_loss, of_gradient = ramp(1.0, 2.0)[level], ramp(4.0, 1.0).sqrt()[level]
    torch.testing.assert_close(loss_density(statistics, schedule), of_loss / of_loss.mean())
    torch.testing.assert_close(gradient_density(statistics, schedule), of_gradient / of_gradient.mean())


def test_a9_published_weights_are_the_formula_within_bounds() -> None:
    statistics, schedule = observed(ramp(1.0, 1.0), ramp(1.0, 2.0)), make_schedule("cosine", T)
    gradient = ramp(1.0, 2.0)[torch.arange(T) // (T // LEVELS)]
    raw = 1.0 / (schedule.sigma.square().clamp(min=1e-3) * gradient)
    limited = (raw / raw.mean()).clamp(0.1, 10.0)
    found = published_weights(statistics, schedule)
    torch.testing.assert_close(found, limited / limited.mean())
    assert float(found.mean()) == pytest.approx(1.0)


def test_an_output_layer_without_gradient_at_a_level_gives_finite_weights() -> None:
    gradient = ramp(0.0, 1.0)
    statistics = observed(ramp(1.0, 1.0), gradient)
    assert bool(published_weights(statistics, make_schedule("linear", T)).isfinite().all())
    zero = observed(ramp(1.0, 1.0), torch.zeros(LEVELS, dtype=torch.float64))
    assert bool(published_weights(zero, make_schedule("linear", T)).isfinite().all())


def test_a4_the_adaptive_density_over_log_snr_is_the_loss() -> None:
    loss = ramp(1.0, 2.0)
    statistics, schedule = observed(loss, ramp(1.0, 1.0)), make_schedule("hybrid", T)
    found = adaptive_density(statistics, schedule)
    speed = torch.gradient(schedule.snr.log())[0].abs()
    ratio = found / (speed * loss[torch.arange(T) // (T // LEVELS)])
    inner = (found > 0.11) & (found < 9)
    assert int(inner.sum()) > T // 2
    torch.testing.assert_close(ratio[inner], ratio[inner].mean().expand(int(inner.sum())), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "zero_end"), list(itertools.product(SCHEDULES, (False, True))))
def test_all_are_positive_and_finite_on_every_schedule(name: str, zero_end: bool) -> None:
    schedule = make_schedule(name, T, zero_terminal_snr=zero_end and name != "flow")
    statistics = observed(ramp(1e-4, 50.0), ramp(1e-6, 1e6))
    for density in ALL:
        values = density(statistics, schedule)
        assert values.shape == (T,) and bool((values > 0).all()) and bool(values.isfinite().all())
        assert float(values.max() / values.min()) <= 100 * (1 + 1e-9)


def test_bounded_keeps_the_mean_and_the_limits() -> None:
    values = bounded(torch.tensor([1e-9, 1.0, 1.0, 1e9], dtype=torch.float64))
    assert float(values.mean()) == pytest.approx(1.0) and float(values[3] / values[0]) == pytest.approx(40.0)
