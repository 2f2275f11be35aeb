"""What the network predicts: noise (eps), the clean sample (x0) or the velocity v = alpha noise - sigma x0.

Together with x_t = alpha x0 + sigma noise every prediction is a linear map of (x0, noise), written once with
its inverse. `alpha` and `sigma` are tensors that broadcast against the samples (see NoiseSchedule.at).
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
    raise _unknown(prediction)


def target(prediction: str, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return what the network should answer, in the shape of `x0`."""
    of_noise, of_x0 = target_weights(prediction, alpha, sigma)
    return of_noise * noise + of_x0 * x0


def x0_weights(prediction: str, alpha: float, sigma: float) -> tuple[float, float]:
    """Return (p, q) such that p x_t + q output is the predicted x0.

    The map is linear, so its weights are its values at unit inputs.

    Raises:
        ConfigError: `to_x0_and_noise` has no answer there.
    """
    unit = torch.eye(2, dtype=torch.float64)
    level = torch.tensor([alpha, sigma], dtype=torch.float64)
    p, q = to_x0_and_noise(prediction, unit[1], unit[0], level[0], level[1])[0].tolist()
    return p, q


def to_x0_and_noise(
    prediction: str, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve for (x0, noise), given the network's answer at `x_t`.

    Raises:
        ConfigError: x0 cannot be recovered (eps at alpha = 0), or the noise cannot (x0 at sigma = 0).
    """
    match prediction:
        case "eps":
            _require_nonzero(alpha, prediction, "alpha")
            return (x_t - sigma * output) / alpha, output
        case "x0":
            _require_nonzero(sigma, prediction, "sigma")
            return output, (x_t - alpha * output) / sigma
        case "v":
            return alpha * x_t - sigma * output, sigma * x_t + alpha * output
    raise _unknown(prediction)


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
    zero = torch.zeros_like(schedule.alpha)
    to_x0_and_noise(prediction, zero, zero, schedule.alpha, schedule.sigma)


def _require_nonzero(amplitude: Tensor, prediction: str, name: str) -> None:
    if bool((amplitude == 0).any()):
        raise ConfigError(
            f"diffusion.prediction = {prediction} cannot be inverted at a timestep with {name} = 0; "
            "use diffusion.prediction = v"
        )


def _unknown(prediction: str) -> ConfigError:
    return ConfigError(f"diffusion.prediction = {prediction} is unknown; use eps, x0 or v")
