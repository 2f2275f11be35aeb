"""Statistics of the loss per noise level, and what is made of them: loss weights and densities over timesteps.

A level is one of L equal ranges of timesteps. The table is the same on every rank, because every rank sees the losses
of the whole global batch; it is a function of them and of their order alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.diffusion.schedule import NoiseSchedule

MOMENTS = ("count", "loss", "squared_loss", "squared_gradient")
# At each refit the sums of the past count half: the network changes, and so do its losses.
_MEMORY = 0.5
# Weights and densities stay within these multiples of 1 and of the uniform density.
_LEAST, _MOST = 0.1, 10.0
_POWER_FLOOR = 1e-3
_LOG_SNR_LIMIT = 20.0


@dataclass(frozen=True, eq=False)
class Observation:
    """What a step says of its samples, in an order that their positions in the stream give; on every rank the same.

    Attributes:
        t: (G,) int64 timesteps.
        loss: (G,) float64, mean squared error over a sample's elements, with its loss weight but without the factor
            of importance.
        squared_gradient: (G,) float64, squared norm of that loss's gradient by the output layer; 0 if not measured.
    """

    t: Tensor
    loss: Tensor
    squared_gradient: Tensor


class LevelStatistics:
    """Running sums per level of the moments of a sample's loss and of its squared gradient norm.

    Attributes:
        sums: (L, 4) float64 in the order of MOMENTS: the table that a checkpoint holds.
        fitted: (L, 4) float64, the sums at the last refit; what weights and densities are made of.
    """

    def __init__(self, num_levels: int, num_train_timesteps: int) -> None:
        self.num_train_timesteps = num_train_timesteps
        self.sums = torch.zeros(num_levels, len(MOMENTS), dtype=torch.float64)
        self.fitted = self.sums.clone()

    @property
    def num_levels(self) -> int:
        return len(self.sums)

    def level_of(self, t: Tensor) -> Tensor:
        """The level of timesteps."""
        return t * self.num_levels // self.num_train_timesteps

    def observe(self, seen: Observation) -> None:
        """Adds a step's samples; one that is not finite (a skipped fp16 step) is left out."""
        columns = torch.stack((torch.ones_like(seen.loss), seen.loss, seen.loss.square(), seen.squared_gradient), 1)
        known = columns.isfinite().all(1, keepdim=True)
        # A product with a one-hot matrix adds in a fixed order on every device, unlike a scatter on CUDA.
        chosen = torch.nn.functional.one_hot(self.level_of(seen.t), self.num_levels).to(columns.dtype)
        if self.sums.device != columns.device:
            self.sums = self.sums.to(columns.device)
        self.sums += chosen.mT @ torch.where(known, columns, 0.0)

    def refit(self) -> None:
        """Takes the sums so far for weights and densities, and lets them fade."""
        self.fitted = self.sums.clone()
        self.sums *= _MEMORY

    def mean(self, moment: str) -> Tensor | None:
        """Mean of a moment at each timestep, (T,) float64 on the CPU, as of the last refit; None before any.

        A level without samples takes the mean of the others.
        """
        count, total = (self.fitted[:, MOMENTS.index(name)].cpu() for name in ("count", moment))
        if not bool((count > 0).any()):
            return None
        per_level = torch.where(count > 0, total / count.clamp(min=1e-300), total.sum() / count.sum())
        return per_level[self.level_of(torch.arange(self.num_train_timesteps))]


def published_weights(statistics: LevelStatistics, schedule: NoiseSchedule) -> Tensor | None:
    """1 / (sigma^2 ||grad L||^2) per timestep, (T,) float64, bounded; None before the first refit.

    sigma^2 has a floor of 1e-3, so that the cleanest steps do not take all the weight.
    """
    gradient = statistics.mean("squared_gradient")
    if gradient is None:
        return None
    power = schedule.sigma.cpu().square().clamp(min=_POWER_FLOOR)
    return bounded(1.0 / (power * _above_zero(gradient)))


def loss_density(statistics: LevelStatistics, schedule: NoiseSchedule) -> Tensor | None:
    """sqrt(E[L^2]) per timestep: among the densities over timesteps it makes the loss estimate vary least."""
    moment = statistics.mean("squared_loss")
    return None if moment is None else bounded(moment.sqrt())


def gradient_density(statistics: LevelStatistics, schedule: NoiseSchedule) -> Tensor | None:
    """sqrt(E ||grad L||^2) per timestep: the same for the gradient (of the output layer, see `OutputGradient`)."""
    moment = statistics.mean("squared_gradient")
    return None if moment is None else bounded(moment.sqrt())


def adaptive_density(statistics: LevelStatistics, schedule: NoiseSchedule) -> Tensor | None:
    """Density over timesteps whose density over log(snr) is the mean loss; None before the first refit.

    Over timesteps that is the mean loss times |d log(snr) / du|, with log(snr) limited to [-20, 20], where an end of
    the schedule is pure noise.
    """
    loss = statistics.mean("loss")
    if loss is None:
        return None
    log_snr = schedule.snr.cpu().log().clamp(-_LOG_SNR_LIMIT, _LOG_SNR_LIMIT)
    speed = torch.gradient(log_snr)[0].abs()
    return bounded(bounded(loss) * speed)


def bounded(values: Tensor) -> Tensor:
    """Scale to mean 1, limit to [0.1, 10], and scale to mean 1 again."""
    limited = (values / values.mean()).clamp(_LEAST, _MOST)
    return limited / limited.mean()


def _above_zero(values: Tensor) -> Tensor:
    """An output layer that starts at zero can have no gradient at a level; there the smallest other one counts."""
    positive = values[values > 0]
    return values.clamp(min=float(positive.min())) if len(positive) else torch.ones_like(values)


# diffusion.importance_density
DENSITIES: dict[str, Callable[[LevelStatistics, NoiseSchedule], Tensor | None]] = {
    "published": published_weights,
    "loss": loss_density,
    "gradient": gradient_density,
}
