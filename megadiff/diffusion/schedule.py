"""Noise schedules: x_t = alpha_t x0 + sigma_t noise with alpha^2 + sigma^2 = 1, in float64 for t = 0 .. T-1.

A new schedule is one function from T to abar = alpha^2 and one line in SCHEDULES.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.errors import ConfigError


@dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """Signal and noise amplitudes of every training timestep; t = 0 is the cleanest.

    Attributes:
        alpha: (T,) float64, falling.
        sigma: (T,) float64, rising.
    """

    alpha: Tensor
    sigma: Tensor

    @property
    def num_train_timesteps(self) -> int:
        return len(self.alpha)

    @property
    def snr(self) -> Tensor:
        """Signal-to-noise ratio (alpha / sigma)^2 of every timestep, (T,) float64."""
        return (self.alpha / self.sigma) ** 2

    def at(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma of timesteps `t` (B,) as (B, 1, ..., 1) in the rank and dtype of `like`."""
        schedule = self.to(t.device)
        shape = (-1,) + (1,) * (like.ndim - 1)
        return schedule.alpha[t].to(like.dtype).view(shape), schedule.sigma[t].to(like.dtype).view(shape)

    def to(self, device: torch.device) -> "NoiseSchedule":
        """Return the schedule with its tables on `device`; itself if they are there."""
        if self.alpha.device == device:
            return self
        return NoiseSchedule(self.alpha.to(device), self.sigma.to(device))


def make_schedule(name: str, num_train_timesteps: int) -> NoiseSchedule:
    """Build the tables of a schedule on the CPU.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"diffusion.schedule = {name} is unknown; use one of {', '.join(SCHEDULES)}")
    abar = SCHEDULES[name](num_train_timesteps)
    return NoiseSchedule(alpha=abar.sqrt(), sigma=(1.0 - abar).sqrt())


def linear(num_train_timesteps: int) -> Tensor:
    """Beta linear from 1e-4 to 0.02 (Ho et al. 2020, section 4)."""
    return _abar_of(torch.linspace(1e-4, 0.02, num_train_timesteps, dtype=torch.float64))


def scaled_linear(num_train_timesteps: int) -> Tensor:
    """The square root of beta linear, beta from 0.00085 to 0.012 (Rombach et al. 2022)."""
    ends = math.sqrt(0.00085), math.sqrt(0.012)
    return _abar_of(torch.linspace(*ends, num_train_timesteps, dtype=torch.float64) ** 2)


def cosine(num_train_timesteps: int) -> Tensor:
    """Squared cosine abar with s = 0.008 and beta capped at 0.999 (Nichol and Dhariwal 2021, equation 17)."""
    offset = 0.008
    u = torch.arange(num_train_timesteps + 1, dtype=torch.float64) / num_train_timesteps
    curve = torch.cos((u + offset) / (1.0 + offset) * (math.pi / 2.0)) ** 2
    # The cap keeps abar above 0 at the last timestep, where the curve itself ends at 0.
    return _abar_of((1.0 - curve[1:] / curve[:-1]).clamp(max=0.999))


def _abar_of(beta: Tensor) -> Tensor:
    return torch.cumprod(1.0 - beta, dim=0)


SCHEDULES: dict[str, Callable[[int], Tensor]] = {
    "linear": linear,
    "scaled_linear": scaled_linear,
    "cosine": cosine,
}
