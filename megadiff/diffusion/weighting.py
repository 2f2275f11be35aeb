"""Loss weights per timestep. A new one is a function of (prediction, snr, gamma) and a line in WEIGHTINGS."""

from collections.abc import Callable

import torch
from torch import Tensor

from megadiff.errors import ConfigError


def uniform(prediction: str, snr: Tensor, gamma: float) -> Tensor:
    """Return ones: the plain squared error of whatever is predicted."""
    return torch.ones_like(snr)


def min_snr(prediction: str, snr: Tensor, gamma: float) -> Tensor:
    """Return the min-SNR-gamma weight (Hang et al. 2023, section 3.4).

    The weight of the x0 error is min(snr, gamma). The squared errors of eps and v are snr and snr + 1 times
    the one of x0, so they are divided by that: all three are the same loss.
    """
    x0_weight = snr.clamp(max=gamma)
    match prediction:
        case "eps":
            return x0_weight / snr
        case "x0":
            return x0_weight
        case "v":
            return x0_weight / (snr + 1.0)
    raise ConfigError(f"diffusion.loss_weight = min_snr is not defined for prediction = {prediction}")


WEIGHTINGS: dict[str, Callable[[str, Tensor, float], Tensor]] = {"uniform": uniform, "min_snr": min_snr}


def loss_weights(name: str, prediction: str, snr: Tensor, gamma: float) -> Tensor:
    """Return the weight of every timestep in the shape of `snr`.

    Raises:
        ConfigError: the name is unknown, or a weight is not finite (eps at snr = 0).
    """
    if name not in WEIGHTINGS:
        raise ConfigError(f"diffusion.loss_weight = {name} is unknown; use one of {', '.join(WEIGHTINGS)}")
    weights = WEIGHTINGS[name](prediction, snr, gamma)
    if not bool(weights.isfinite().all()):
        raise ConfigError(
            f"diffusion.loss_weight = {name} is not finite for diffusion.prediction = {prediction} where "
            "snr = 0; use diffusion.prediction = v"
        )
    return weights
