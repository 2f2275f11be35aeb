"""Numbers from two normal distributions: what a network should answer, and where the exact flow ends."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.diffusion.schedule import NoiseSchedule
from megadiff.sampling.grids import timestep_grid
from megadiff.sampling.guidance import Guidance, Predict
from megadiff.sampling.sampler import Sampler, make_calls
from megadiff.sampling.solvers import levels_of

_PLAIN = Guidance(1.0, num_classes=1)
_QUANTILES = 400


@dataclass(frozen=True)
class Mixture:
    """Two normal distributions of one deviation, with the share of the first."""

    means: tuple[float, float]
    std: float
    share: float

    def denoiser(self, schedule: NoiseSchedule) -> Predict:
        """The mean of x0 given x_t: the best answer of an x0-network."""

        def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
            alpha, sigma = schedule.at(t, x_t)
            variance = alpha**2 * self.std**2 + sigma**2
            shape = (2,) + (1,) * x_t.ndim
            means = torch.tensor(self.means, dtype=x_t.dtype).view(shape)
            shares = torch.tensor((self.share, 1 - self.share), dtype=x_t.dtype).view(shape)
            distance = x_t - alpha * means
            weights = (shares.log() - distance**2 / (2 * variance)).softmax(0)
            return (weights * (means + alpha * self.std**2 / variance * distance)).sum(0)

        return predict

    def flow_end(self, x_t: Tensor, alpha: float, sigma: float) -> Tensor:
        """Where the probability flow takes x_t: one dimension keeps its order, so quantiles map to quantiles."""
        quantile = self._cumulative(x_t, alpha, sigma)
        low, high = torch.full_like(x_t, -8.0), torch.full_like(x_t, 8.0)
        for _ in range(60):
            middle = (low + high) / 2
            is_left = self._cumulative(middle, 1.0, 0.0) < quantile
            low, high = torch.where(is_left, middle, low), torch.where(is_left, high, middle)
        return (low + high) / 2

    def error(self, solver: str, schedule: NoiseSchedule, grid: str, calls: int) -> float:
        """Root mean square distance from where the exact flow ends, over the quantiles of the noise, float64.

        Args:
            solver: of SOLVERS, without noise of its own.
            schedule: the levels.
            grid: of GRIDS.
            calls: of the network; Heun's method takes about half as many steps.
        """
        timesteps = timestep_grid(grid, schedule, (calls + 1) // 2 if solver == "heun" else calls)
        quantiles = torch.linspace(0.002, 0.998, _QUANTILES, dtype=torch.float64)
        noise = torch.special.ndtri(quantiles).view(1, 1, 1, -1)
        sampler = Sampler(make_calls(schedule, "x0", timesteps, solver, _PLAIN), _PLAIN)
        one = torch.zeros(1, dtype=torch.int64)
        found = sampler(self.denoiser(schedule), noise, one, 0, one)
        start = levels_of(schedule, timesteps)[0]
        return float((found - self.flow_end(noise, start.alpha, start.sigma)).square().mean().sqrt())

    def _cumulative(self, x: Tensor, alpha: float, sigma: float) -> Tensor:
        deviation = (alpha**2 * self.std**2 + sigma**2) ** 0.5
        first, second = (torch.special.ndtr((x - alpha * mean) / deviation) for mean in self.means)
        return self.share * first + (1 - self.share) * second


WIDE = Mixture((-0.8, 0.8), 0.6, 0.4)  # about the deviation of pictures
NARROW = Mixture((-0.6, 0.5), 0.2, 0.3)  # turns sharply where a sample decides for one of the two
