"""Draws follow their density, are functions of (seed, step, sample id), and their weights undo the density."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.diffusion.timesteps import TimestepSampler, logit_normal
from megadiff.ops import philox
from megadiff.ops.philox import Purpose

NUM = 100_000


def some_density(num: int) -> torch.Tensor:
    return torch.linspace(0.2, 3.0, num, dtype=torch.float64).square()


def test_without_a_density_draws_are_the_uniform_integers_of_before() -> None:
    ids = torch.arange(50)
    expected = philox.integers(3, 7, ids, Purpose.TIMESTEP, 1000)
    assert torch.equal(TimestepSampler(1000).draw(3, 7, ids), expected)


@pytest.mark.parametrize("density", [some_density(20), logit_normal(20, 0.5, 0.7)], ids=["powers", "logit-normal"])
def test_draws_follow_the_density(density: torch.Tensor) -> None:
    sampler = TimestepSampler(20, density)
    counts = sampler.draw(0, 0, torch.arange(NUM)).bincount(minlength=20)
    expected = NUM * density / density.sum()
    used = expected > 5
    assert float(((counts - expected) ** 2 / expected)[used].sum()) < 50.8  # 0.9999 quantile, 19 degrees of freedom


def test_a_flat_density_draws_the_uniform_timesteps() -> None:
    ids = torch.arange(1000)
    flat = TimestepSampler(1000, torch.ones(1000, dtype=torch.float64)).draw(1, 2, ids)
    assert int((flat - TimestepSampler(1000).draw(1, 2, ids)).abs().max()) <= 1  # the sums round at the edges


@given(seed=st.integers(0, 2**40), step=st.integers(0, 2**20))
def test_a_draw_depends_on_seed_step_and_sample_alone(seed: int, step: int) -> None:
    sampler, ids = TimestepSampler(50, some_density(50)), torch.tensor([9, 3, 2**40])
    whole = sampler.draw(seed, step, ids)
    assert torch.equal(torch.cat([sampler.draw(seed, step, ids[i : i + 1]) for i in range(3)]), whole)
    assert int(whole.min()) >= 0 and int(whole.max()) < 50


def test_the_weights_make_the_mean_that_of_all_timesteps() -> None:
    """Within three standard errors over 1e5 draws."""
    sampler = TimestepSampler(1000, some_density(1000))
    losses = torch.linspace(5.0, 0.1, 1000, dtype=torch.float64).exp()
    t = sampler.draw(4, 0, torch.arange(NUM))
    estimates = losses[t] * sampler.unbiased_weights()[t]
    error = float(estimates.std()) / math.sqrt(NUM)
    assert abs(float(estimates.mean() - losses.mean())) < 3 * error
    assert float(losses[t].mean()) < float(losses.mean()) - 3 * error, "without weights it is another mean"


def test_logit_normal_is_the_normal_distribution_of_logits() -> None:
    density = logit_normal(1000, 0.0, 1.0)
    assert float(density.sum()) == pytest.approx(1.0, abs=1e-9)
    below = NormalDist().cdf(math.log(0.25 / 0.75))
    assert float(density[:250].sum()) == pytest.approx(below, abs=1e-9)
    assert bool((density > 0).all())
