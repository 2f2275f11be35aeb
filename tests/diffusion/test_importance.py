"""Refits happen when they should, change what they should, and a restored state goes on bit for bit."""

from typing import Any

import pytest
import torch

from megadiff.config.schema import Config
from megadiff.diffusion.importance import Importance, make_importance
from megadiff.diffusion.levels import Observation
from megadiff.diffusion.schedule import make_schedule

T = 100
FORMS: dict[str, dict[str, Any]] = {
    "weight": {"importance": "weight"},
    "gradient": {"importance": "density"},
    "loss": {"importance": "density", "importance_density": "loss"},
    "published": {"importance": "density", "importance_density": "published"},
    "adaptive": {"timestep_sampling": "adaptive"},
    "weight on logit-normal": {"importance": "weight", "timestep_sampling": "logit_normal"},
    "weight on adaptive": {"importance": "weight", "timestep_sampling": "adaptive"},
}


def make(settings: dict[str, Any], refit_from: int = 4, refit_every: int = 3) -> Importance:
    config = Config.model_validate({"diffusion": {"num_train_timesteps": T, "num_levels": 10, **settings}})
    return Importance(config.diffusion, make_schedule("cosine", T), refit_from, refit_every)


def seen(step: int) -> Observation:
    generator = torch.Generator().manual_seed(step)
    t = torch.randint(T, (64,), generator=generator)
    loss = torch.rand(64, generator=generator, dtype=torch.float64) * (T - t)
    return Observation(t, loss, loss.square() * (1 + t))


def run(importance: Importance, first: int, last: int) -> list[int]:
    """The steps after which something changed."""
    return [step for step in range(first, last + 1) if importance.after_step(step, seen(step))]


def density_of(importance: Importance) -> list[float] | None:
    return None if importance.sampler.density is None else importance.sampler.density.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_refits_begin_at_their_step_and_come_back(form: str) -> None:
    importance = make(FORMS[form])
    before = density_of(importance), importance.factors
    assert run(importance, 1, 3) == []
    assert (density_of(importance), importance.factors) == before
    assert run(importance, 4, 11) == [4, 7, 10]
    assert (density_of(importance), importance.factors.tolist()) != (before[0], before[1].tolist())


@pytest.mark.parametrize("form", FORMS)
def test_a_restored_state_goes_on_bit_for_bit(form: str) -> None:
    straight = make(FORMS[form])
    run(straight, 1, 12)
    for stop in (2, 4, 5, 9):
        first, second = make(FORMS[form]), make(FORMS[form])
        run(first, 1, stop)
        second.restore(first.state())
        assert density_of(second) == density_of(first) and torch.equal(second.factors, first.factors)
        run(second, stop + 1, 12)
        assert torch.equal(second.state(), straight.state())
        assert density_of(second) == density_of(straight) and torch.equal(second.factors, straight.factors)


def test_a_density_is_unbiased_and_an_adaptive_one_is_not() -> None:
    """By expectation, not by draws: the sum of p(t) factor(t) L(t) against the mean of L."""
    losses = torch.linspace(1, 9, T, dtype=torch.float64)
    for form in ("gradient", "loss", "published"):
        importance = make(FORMS[form])
        run(importance, 1, 4)
        expected = float((importance.sampler.density * importance.factors * losses).sum())
        assert expected == pytest.approx(float(losses.mean()), rel=1e-12)
    adaptive = make(FORMS["adaptive"])
    run(adaptive, 1, 4)
    assert adaptive.factors.tolist() == [1.0] * T
    assert float((adaptive.sampler.density * losses).sum()) != pytest.approx(float(losses.mean()), rel=1e-3)


def test_both_a_weight_and_an_adaptive_density_are_refitted_together() -> None:
    importance = make(FORMS["weight on adaptive"])
    run(importance, 1, 4)
    assert importance.sampler.density is not None and importance.factors.std() > 0


def test_without_importance_nothing_is_kept() -> None:
    importance = make({})
    assert importance.state() is None and run(importance, 1, 5) == []


@pytest.mark.parametrize(("steps", "start", "every"), [(100, 10, 2), (1_000_000, 5000, 1000), (5, 1, 1)])
def test_refits_of_a_run_follow_its_length(steps: int, start: int, every: int) -> None:
    settings = {"train": {"steps": steps}, "diffusion": {"importance": "density"}}
    config = Config.model_validate(settings)
    importance = make_importance(config, make_schedule("cosine", 1000))
    assert (importance.refit_from, importance.refit_every) == (start, every)
