"""What the network predicts: noise (eps), the clean sample (x0), v = alpha noise - sigma x0, or flow = noise - x0.

Every prediction is a noise + b x0. Together with x_t = sigma noise + alpha x0 it is a linear map of (noise, x0), whose
determinant a alpha - b sigma says where it can be inverted. `alpha` and `sigma` are tensors that broadcast against the
samples (see NoiseSchedule.at).
"""

import torch
from torch import Tensor

from megadiff.diffusion.schedule import NoiseSchedule
from megadiff.errors import ConfigError


def target_weights(prediction: str, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return (a, b), each like `alpha`, such that a noise + b x0 is what the network should answer."""
    match prediction:
        case "eps":
            return torch.ones_like(alpha), torch.zeros_like(alpha)
        case "x0":
            return torch.zeros_like(alpha), torch.ones_like(alpha)
        case "v":  # Salimans and Ho 2022, appendix D
            return alpha, -sigma
        case "flow":  # Lipman et al. 2023, equation 23 with sigma_min = 0
            return torch.ones_like(alpha), -torch.ones_like(alpha)
    raise _unknown(prediction)


def target(prediction: str, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return what the network should answer, in the shape of `x0`."""
    of_noise, of_x0 = target_weights(prediction, alpha, sigma)
    return of_noise * noise + of_x0 * x0


def x0_weights(prediction: str, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return (p, q), each like `alpha`, such that p x_t + q output is the predicted x0.

    Raises:
        ConfigError: x0 cannot be recovered, or the noise cannot.
    """
    of_noise, of_x0 = target_weights(prediction, alpha, sigma)
    determinant = _determinant(prediction, of_noise, of_x0, alpha, sigma)
    return of_noise / determinant, -sigma / determinant


def to_x0_and_noise(
    prediction: str, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve for (x0, noise), given the network's answer at `x_t`.

    Raises:
        ConfigError: x0 cannot be recovered (eps at alpha = 0), or the noise cannot (x0 at sigma = 0).
    """
    of_noise, of_x0 = target_weights(prediction, alpha, sigma)
    determinant = _determinant(prediction, of_noise, of_x0, alpha, sigma)
    x0 = output if prediction == "x0" else (of_noise * x_t - sigma * output) / determinant
    noise = output if prediction == "eps" else (alpha * output - of_x0 * x_t) / determinant
    return x0, noise


def error_ratio(prediction: str, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Squared error of a prediction over that of the x0 that follows from it, at a fixed x_t.

    An error d of x0 is -alpha d / sigma of the noise, hence (b - a alpha / sigma) d of the prediction. This is snr for
    eps, 1 for x0, snr + 1 for v where the variance is kept, and (1 + alpha / sigma)^2 for flow.
    """
    of_noise, of_x0 = target_weights(prediction, alpha, sigma)
    return (of_x0 - of_noise * alpha / sigma).square()


def convert(output: Tensor, source: str, destination: str, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Turn a prediction of one kind into another kind of prediction at the same `x_t`."""
    if source == destination:
        return output
    x0, noise = to_x0_and_noise(source, output, x_t, alpha, sigma)
    return target(destination, x0, noise, alpha, sigma)


def require_invertible(prediction: str, schedule: NoiseSchedule) -> None:
    """Refuse a prediction that loses x0 or the noise at some timestep of the schedule.

    Raises:
        ConfigError: eps with alpha = 0 (pure noise at the end), or x0 with sigma = 0.
    """
    x0_weights(prediction, schedule.alpha, schedule.sigma)


def _determinant(prediction: str, of_noise: Tensor, of_x0: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Of the map from (noise, x0) to (prediction, x_t); refused where it is 0."""
    determinant = of_noise * alpha - of_x0 * sigma
    if bool((determinant == 0).any()):
        name = "alpha" if prediction == "eps" else "sigma"
        raise ConfigError(
            f"diffusion.prediction = {prediction} cannot be inverted at a timestep with {name} = 0, which "
            "diffusion.schedule and diffusion.zero_terminal_snr give; use diffusion.prediction = v or flow"
        )
    return determinant


def _unknown(prediction: str) -> ConfigError:
    return ConfigError(f"diffusion.prediction = {prediction} is unknown; use eps, x0, v or flow")
