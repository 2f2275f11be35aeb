"""Noise schedules: x_t = alpha_t x0 + sigma_t noise, in float64 for t = 0 .. T-1; entry t stands for u = (t + 1) / T.

All keep the variance (alpha^2 + sigma^2 = 1) but flow, which is a straight line (alpha + sigma = 1). A new schedule is
one function from T to (alpha, sigma) and one line in SCHEDULES.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.config.networks import schedule_shift
from megadiff.config.schema import Config
from megadiff.errors import ConfigError

Amplitudes = tuple[Tensor, Tensor]


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

    @property
    def d_alpha(self) -> Tensor:
        """Derivative of alpha by u in [0, 1], (T,) float64; second order in 1 / T, the ends included."""
        return _derivative(self.alpha)

    @property
    def d_sigma(self) -> Tensor:
        """Derivative of sigma by u, like d_alpha; coarse in the first steps where sigma grows as a root of u."""
        return _derivative(self.sigma)

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


def schedule_of(config: Config) -> NoiseSchedule:
    """The schedule that training and sampling of a run share, on the CPU."""
    diffusion = config.diffusion
    return make_schedule(
        diffusion.schedule,
        diffusion.num_train_timesteps,
        diffusion.hybrid_linear_fraction,
        diffusion.zero_terminal_snr,
        schedule_shift(config),
    )


def make_schedule(
    name: str,
    num_train_timesteps: int,
    hybrid_linear_fraction: float = 0.3,
    zero_terminal_snr: bool = False,
    shift: float = 1.0,
) -> NoiseSchedule:
    """Build the tables of a schedule on the CPU.

    Args:
        name: of SCHEDULES.
        num_train_timesteps: T.
        hybrid_linear_fraction: share of the linear part of the hybrid schedule.
        zero_terminal_snr: rescale so that the last step is pure noise, see `end_in_noise`.
        shift: divides alpha / sigma everywhere, see `shifted`.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"diffusion.schedule = {name} is unknown; use one of {', '.join(SCHEDULES)}")
    if name == "hybrid":
        alpha, sigma = hybrid(num_train_timesteps, hybrid_linear_fraction)
    else:
        alpha, sigma = SCHEDULES[name](num_train_timesteps)
    if zero_terminal_snr:
        alpha, sigma = end_in_noise(alpha)
    return NoiseSchedule(*shifted(alpha, sigma, shift, keeps_variance=name != "flow"))


def linear(num_train_timesteps: int) -> Amplitudes:
    """Beta linear from 1e-4 to 0.02 (Ho et al. 2020, section 4)."""
    return _of_beta(torch.linspace(1e-4, 0.02, num_train_timesteps, dtype=torch.float64))


def scaled_linear(num_train_timesteps: int) -> Amplitudes:
    """The square root of beta linear, beta from 0.00085 to 0.012 (Rombach et al. 2022)."""
    ends = math.sqrt(0.00085), math.sqrt(0.012)
    return _of_beta(torch.linspace(*ends, num_train_timesteps, dtype=torch.float64) ** 2)


def cosine(num_train_timesteps: int) -> Amplitudes:
    """Squared cosine abar with s = 0.008 and beta capped at 0.999 (Nichol and Dhariwal 2021, equation 17)."""
    offset = 0.008
    u = torch.arange(num_train_timesteps + 1, dtype=torch.float64) / num_train_timesteps
    curve = torch.cos((u + offset) / (1.0 + offset) * (math.pi / 2.0)) ** 2
    # The cap keeps abar above 0 at the last timestep, where the curve itself ends at 0.
    return _of_beta((1.0 - curve[1:] / curve[:-1]).clamp(max=0.999))


def hybrid(num_train_timesteps: int, linear_fraction: float = 0.3) -> Amplitudes:
    """Noise power a u + (1 - a) (1 - cos(pi u / 2)), scaled into [1e-4, 1 - 1e-4] so that both ends are finite.

    Args:
        num_train_timesteps: T.
        linear_fraction: a. 0.3 spends steps at low noise; 0.7 is nearer to a line.
    """
    u = _grid(num_train_timesteps)
    power = linear_fraction * u + (1.0 - linear_fraction) * (1.0 - torch.cos(math.pi / 2.0 * u))
    floor = 1e-4
    return _of_abar(1.0 - (floor + (1.0 - 2.0 * floor) * power))


def flow(num_train_timesteps: int) -> Amplitudes:
    """A straight line from data to noise, x_t = (1 - u) x0 + u noise (Lipman et al. 2023; Liu et al. 2023)."""
    u = _grid(num_train_timesteps)
    return 1.0 - u, u


def end_in_noise(alpha: Tensor) -> Amplitudes:
    """Shift and scale alpha so that it is 0 at the last timestep and as before at the first (Lin et al. 2023, alg. 1).

    Raises:
        ConfigError: fewer than two timesteps.
    """
    if len(alpha) < 2:
        raise ConfigError(
            f"diffusion.zero_terminal_snr = true with diffusion.num_train_timesteps = {len(alpha)} leaves noise alone; "
            "use at least 2 timesteps"
        )
    rescaled = (alpha - alpha[-1]) * (alpha[0] / (alpha[0] - alpha[-1]))
    return rescaled, (1.0 - rescaled**2).sqrt()


def shifted(alpha: Tensor, sigma: Tensor, shift: float, keeps_variance: bool) -> Amplitudes:
    """Divide alpha / sigma by `shift` at every timestep: above 1, more of the steps are noisy.

    On the straight line this is u' = s u / (1 + (s - 1) u) (Esser et al. 2024, section 5.3.2); with kept variance it
    lowers log(snr) by 2 log(s) (Hoogeboom et al. 2023, equation 3).
    """
    if shift == 1.0:
        return alpha, sigma
    noisier = shift * sigma
    length = torch.hypot(alpha, noisier) if keeps_variance else alpha + noisier
    return alpha / length, noisier / length


def _grid(num_train_timesteps: int) -> Tensor:
    return torch.arange(1, num_train_timesteps + 1, dtype=torch.float64) / num_train_timesteps


def _of_beta(beta: Tensor) -> Amplitudes:
    return _of_abar(torch.cumprod(1.0 - beta, dim=0))


def _of_abar(abar: Tensor) -> Amplitudes:
    return abar.sqrt(), (1.0 - abar).sqrt()


def _derivative(table: Tensor) -> Tensor:
    return torch.gradient(table, spacing=1.0 / len(table), edge_order=min(2, len(table) - 1))[0]


SCHEDULES: dict[str, Callable[[int], Amplitudes]] = {
    "linear": linear,
    "scaled_linear": scaled_linear,
    "cosine": cosine,
    "hybrid": hybrid,
    "flow": flow,
}
