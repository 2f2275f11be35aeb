"""From which distribution a sample's timestep is drawn; every draw is a function of (seed, step, sample id)."""

from statistics import NormalDist

import torch
from torch import Tensor

from megadiff.ops import philox
from megadiff.ops.philox import Purpose


class TimestepSampler:
    """Draws timesteps in [0, T), uniformly or by a density.

    Attributes:
        density: (T,) float64 probabilities that sum to 1, or None where all timesteps are equally likely.
    """

    def __init__(self, num_train_timesteps: int, density: Tensor | None = None) -> None:
        """Takes positive values for `density`, which are normalised here."""
        self.num_train_timesteps = num_train_timesteps
        self.density: Tensor | None = None
        self.set_density(density)

    def set_density(self, density: Tensor | None) -> None:
        """Draws from another density from now on."""
        self.density = None if density is None else density / density.sum()
        self._cumulative = None if self.density is None else self.density.cumsum(0)

    def draw(self, seed: int, step: int, sample_ids: Tensor) -> Tensor:
        """Timesteps (B,) int64 of the samples (B,) in an optimizer step, on their device.

        A density is drawn from by its inverse: as the uniform number grows, so does the timestep.
        """
        if self._cumulative is None:
            return philox.integers(seed, step, sample_ids, Purpose.TIMESTEP, self.num_train_timesteps)
        if self._cumulative.device != sample_ids.device:
            self._cumulative = self._cumulative.to(sample_ids.device)
        uniform = philox.uniform(seed, step, sample_ids, Purpose.TIMESTEP, dtype=torch.float64)
        found = torch.searchsorted(self._cumulative, uniform, right=True)
        return found.clamp(max=self.num_train_timesteps - 1)  # the sum may round to less than a uniform number

    def unbiased_weights(self) -> Tensor:
        """1 / (T p), (T,) float64: with these weights the mean over draws is the mean over all timesteps."""
        if self.density is None:
            return torch.ones(self.num_train_timesteps, dtype=torch.float64)
        return 1.0 / (self.num_train_timesteps * self.density)


def logit_normal(num_train_timesteps: int, mean: float, std: float) -> Tensor:
    """Probability of each timestep, (T,) float64, if logit(u) is normal (Esser et al. 2024, section 3.1).

    Timestep t stands for u in (t / T, (t + 1) / T].
    """
    edges = torch.arange(num_train_timesteps + 1, dtype=torch.float64) / num_train_timesteps
    normal = NormalDist(mean, std)
    cumulative = torch.tensor([normal.cdf(logit) for logit in edges.logit().tolist()], dtype=torch.float64)
    # A floor keeps steps in the tails possible where the difference rounds to 0.
    return cumulative.diff().clamp(min=1e-12)
