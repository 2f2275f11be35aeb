"""Which training timesteps a sampler visits: distinct integers that fall from noise to data.

A new grid is one function from (schedule, steps) to positions t + 1, which need not be whole, and one line in GRIDS.
"""

import math
from collections.abc import Callable, Sequence

import torch

from megadiff.diffusion.schedule import NoiseSchedule
from megadiff.errors import ConfigError

_KARRAS_RHO = 7.0


def timestep_grid(name: str, schedule: NoiseSchedule, steps: int, shift: float = 1.0) -> tuple[int, ...]:
    """Return `steps` distinct training timesteps, falling.

    Args:
        name: of GRIDS.
        schedule: the one of training.
        steps: 1 .. T.
        shift: moves a position u of time to shift u / (1 + (shift - 1) u); above 1 spends more steps at high noise
            (Esser et al. 2024, equation 23).

    Raises:
        ConfigError: more steps than training timesteps.
    """
    total = schedule.num_train_timesteps
    if not 1 <= steps <= total:
        raise ConfigError(
            f"sampling.steps = {steps} is not between 1 and diffusion.num_train_timesteps = {total}; use fewer steps"
        )
    positions = GRIDS[name](schedule, steps)
    if shift != 1.0:
        positions = [total * shift * p / (total + (shift - 1.0) * p) for p in positions]
    # Halves are rounded up, so that evenly spaced positions do not coincide.
    return _distinct([math.floor(p + 0.5) - 1 for p in positions], total)


def _trailing(schedule: NoiseSchedule, steps: int) -> list[float]:
    """Ends of equal parts of time, from T - 1, where training ends in noise (Lin et al. 2023, table 2)."""
    return [schedule.num_train_timesteps * i / steps for i in range(steps, 0, -1)]


def _leading(schedule: NoiseSchedule, steps: int) -> list[float]:
    """Beginnings of equal parts; the noisiest timesteps are left out (Ho et al. 2020, as commonly respaced)."""
    stride = schedule.num_train_timesteps // steps
    return [float(i * stride + 1) for i in range(steps - 1, -1, -1)]


def _linspace(schedule: NoiseSchedule, steps: int) -> list[float]:
    """Both ends and equal strides between them; a single step starts in noise."""
    total = schedule.num_train_timesteps
    return [total - i * (total - 1) / max(1, steps - 1) for i in range(steps)]


def _karras(schedule: NoiseSchedule, steps: int) -> list[float]:
    """Equal strides of (sigma / alpha)^(1 / 7): most steps at low noise (Karras et al. 2022, equation 5)."""
    return _at_ratios(schedule, steps, lambda ratio: ratio ** (1 / _KARRAS_RHO), lambda root: root**_KARRAS_RHO)


def _exponential(schedule: NoiseSchedule, steps: int) -> list[float]:
    """Equal strides of log(sigma / alpha)."""
    return _at_ratios(schedule, steps, math.log, math.exp)


def _at_ratios(
    schedule: NoiseSchedule, steps: int, forward: Callable[[float], float], back: Callable[[float], float]
) -> list[float]:
    """The timesteps nearest to equal strides of a function of sigma / alpha; pure noise, if any, comes before."""
    ratios = schedule.sigma / schedule.alpha
    pure_noise = [float(len(ratios))] if schedule.alpha[-1] == 0 else []
    count = steps - len(pure_noise)
    known = ratios[: len(ratios) - len(pure_noise)]
    high, low = forward(float(known[-1])), forward(float(known[0]))
    wanted = [back(high + (low - high) * i / max(1, count - 1)) for i in range(count)]
    distance = known.log() - torch.tensor(wanted, dtype=torch.float64).log()[:, None]
    return pure_noise + [float(t + 1) for t in distance.abs().argmin(dim=1).tolist()]


def _distinct(timesteps: Sequence[int], total: int) -> tuple[int, ...]:
    """Moves timesteps that rounding put together to the nearest free ones below, or above at the end."""
    falling: list[int] = []
    for t in timesteps:
        falling.append(min(t, falling[-1] - 1 if falling else total - 1))
    return tuple(max(t, len(falling) - 1 - i) for i, t in enumerate(falling))


GRIDS: dict[str, Callable[[NoiseSchedule, int], list[float]]] = {
    "trailing": _trailing,
    "leading": _leading,
    "linspace": _linspace,
    "karras": _karras,
    "exponential": _exponential,
}
