"""Loss weights per timestep. A new one is a function of (prediction, schedule, gamma) and a line in WEIGHTINGS."""

from collections.abc import Callable

import torch
from torch import Tensor

from megadiff.diffusion.prediction import error_ratio
from megadiff.diffusion.schedule import NoiseSchedule
from megadiff.errors import ConfigError


def uniform(prediction: str, schedule: NoiseSchedule, gamma: float) -> Tensor:
    """Return ones: the plain squared error of whatever is predicted."""
    return torch.ones_like(schedule.alpha)


def min_snr(prediction: str, schedule: NoiseSchedule, gamma: float) -> Tensor:
    """Return the min-SNR-gamma weight (Hang et al. 2023, section 3.4).

    The weight of the x0 error is min(snr, gamma), so that of a prediction is divided by how much larger its squared
    error is: min(snr, gamma) / snr for eps, / (snr + 1) for v, / (1 + sqrt(snr))^2 for flow. All are the same loss. At
    snr = 0 the weight of v and flow is 0: the step of pure noise is not learnt.
    """
    return schedule.snr.clamp(max=gamma) / error_ratio(prediction, schedule.alpha, schedule.sigma)


WEIGHTINGS: dict[str, Callable[[str, NoiseSchedule, float], Tensor]] = {"uniform": uniform, "min_snr": min_snr}


def loss_weights(name: str, prediction: str, schedule: NoiseSchedule, gamma: float) -> Tensor:
    """Return the weight of every timestep, (T,) float64.

    Raises:
        ConfigError: the name is unknown, or a weight is not finite (eps at snr = 0).
    """
    if name not in WEIGHTINGS:
        raise ConfigError(f"diffusion.loss_weight = {name} is unknown; use one of {', '.join(WEIGHTINGS)}")
    weights = WEIGHTINGS[name](prediction, schedule, gamma)
    if not bool(weights.isfinite().all()):
        raise ConfigError(
            f"diffusion.loss_weight = {name} is not finite for diffusion.prediction = {prediction} where "
            "snr = 0; use diffusion.prediction = v"
        )
    return weights
