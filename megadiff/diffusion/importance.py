"""Which timesteps are trained how often and how much, refitted from the losses that a run meets (A4, A9)."""

import torch
from torch import Tensor

from megadiff.config.diffusion import refits
from megadiff.config.schema import Config, DiffusionConfig
from megadiff.diffusion.levels import DENSITIES, LevelStatistics, Observation, adaptive_density, published_weights
from megadiff.diffusion.schedule import NoiseSchedule
from megadiff.diffusion.timesteps import TimestepSampler, logit_normal


class Importance:
    """The distribution of timesteps and a factor on their losses; both change at refits only.

    Attributes:
        sampler: draws the timesteps.
        factors: (T,) float64, multiplied with the loss weights: 1 without importance, 1 / (T p) under a density that
            must not bias the loss, the published w(t) where importance is a weight.
        statistics: the table behind them, None where nothing is refitted.
    """

    def __init__(self, config: DiffusionConfig, schedule: NoiseSchedule, refit_from: int = 1, refit_every: int = 1):
        """Starts uniform (or logit-normal) until the first refit.

        Args:
            config: which importance or adaptive density, if any.
            schedule: of the run.
            refit_from: optimizer step after which the first refit happens.
            refit_every: steps between refits.
        """
        self.config, self.schedule = config, schedule
        self.refit_from, self.refit_every = refit_from, refit_every
        count = schedule.num_train_timesteps
        density = None
        if config.timestep_sampling == "logit_normal":
            density = logit_normal(count, config.logit_normal_mean, config.logit_normal_std)
        self.sampler = TimestepSampler(count, density)
        self.factors = torch.ones(count, dtype=torch.float64)
        self.statistics = LevelStatistics(config.num_levels, count) if refits(config) else None

    def after_step(self, step: int, seen: Observation) -> bool:
        """Takes in a step's losses; `step` counts from 1. True if the density or the weights have changed."""
        if self.statistics is None:
            return False
        self.statistics.observe(seen)
        if step < self.refit_from or (step - self.refit_from) % self.refit_every:
            return False
        self.statistics.refit()
        self.apply()
        return True

    def apply(self) -> None:
        """Makes density and factors from the statistics of the last refit."""
        assert self.statistics is not None, "a run without statistics"
        config = self.config
        if config.timestep_sampling == "adaptive":  # it is meant to change what is trained: no factor undoes it
            self.sampler.set_density(adaptive_density(self.statistics, self.schedule))
        if config.importance == "density":
            self.sampler.set_density(DENSITIES[config.importance_density](self.statistics, self.schedule))
            self.factors = self.sampler.unbiased_weights()
        if config.importance == "weight":
            weights = published_weights(self.statistics, self.schedule)
            self.factors = torch.ones_like(self.factors) if weights is None else weights

    def state(self) -> Tensor | None:
        """(2, L, 4) float64 for a checkpoint: the running sums and those of the last refit; None without any."""
        if self.statistics is None:
            return None
        return torch.stack((self.statistics.sums, self.statistics.fitted.to(self.statistics.sums.device)))

    def restore(self, state: Tensor) -> None:
        """Takes back what `state` gave."""
        assert self.statistics is not None, "a run without statistics"
        self.statistics.sums, self.statistics.fitted = state[0].clone(), state[1].clone()
        self.apply()


def make_importance(config: Config, schedule: NoiseSchedule) -> Importance:
    """For a run, with the steps of its refits."""
    diffusion, steps = config.diffusion, config.train.steps
    start = diffusion.refit_from_step or min(5000, max(1, steps // 10))
    every = diffusion.refit_every_steps or min(1000, max(1, steps // 50))
    return Importance(diffusion, schedule, start, every)
