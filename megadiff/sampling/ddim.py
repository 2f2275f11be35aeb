"""DDIM sampling (Song et al. 2021) on a respaced grid of training timesteps."""

import math

import torch
from torch import Tensor

from megadiff.diffusion.prediction import x0_weights
from megadiff.diffusion.schedule import NoiseSchedule
from megadiff.errors import ConfigError
from megadiff.ops import philox
from megadiff.ops.library import Kernels
from megadiff.ops.philox import Purpose
from megadiff.ops.solver_step import solver_step
from megadiff.sampling.guidance import Predict, predict_both


def sampling_timesteps(num_train_timesteps: int, steps: int) -> tuple[int, ...]:
    """Return `steps` evenly spaced training timesteps, falling from T - 1, where training ends in noise.

    Step i is round(T - i T / steps) - 1, the "trailing" spacing of Lin et al. 2023, table 2.

    Raises:
        ConfigError: more steps than training timesteps.
    """
    if not 1 <= steps <= num_train_timesteps:
        raise ConfigError(
            f"sampling.steps = {steps} is not between 1 and diffusion.num_train_timesteps = "
            f"{num_train_timesteps}; use fewer steps"
        )
    # In integers and with halves rounded up, so that no two steps coincide.
    return tuple((2 * num_train_timesteps * i + steps) // (2 * steps) - 1 for i in range(steps, 0, -1))


def initial_noise(seed: int, image_ids: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (B, *shape) noise to start from: an image of a seed starts alike in any batch and layout."""
    return philox.normal(seed, 0, image_ids, Purpose.INITIAL, shape, dtype)


@torch.no_grad()
def ddim_sample(
    predict: Predict,
    schedule: NoiseSchedule,
    prediction: str,
    noise: Tensor,
    labels: Tensor,
    num_classes: int,
    steps: int,
    guidance: float,
    eta: float,
    clip_x0: bool,
    seed: int,
    image_ids: Tensor,
    kernels: Kernels = "auto",
) -> Tensor:
    """Turn noise into images with `steps` calls of `predict`; the last step ends exactly at the predicted x0.

    Args:
        predict: the network; called with a doubled batch unless guidance is 1. Only the first C channels of
            its output are used.
        schedule: the one of training.
        prediction: what the network predicts: eps, x0, v or flow.
        noise: (B, C, H, W), see initial_noise; its dtype is the one of the arithmetic.
        labels: conditions, (B,) int64 or (B, F) float, see `megadiff.diffusion.condition`.
        num_classes: fixes the null label.
        steps: 1 .. T.
        guidance: 1 is plain conditional sampling, 0 unconditional.
        eta: 0 is deterministic, 1 adds as much noise as ancestral sampling.
        clip_x0: clamp every predicted x0 to [-1, 1] (pixels, not latents).
        seed: of the noise that eta > 0 adds.
        image_ids: (B,) int64, which make that noise independent of the batch.
        kernels: whether the fused kernel of the update may run.

    Returns:
        (B, C, H, W) images in the dtype of `noise`.

    Raises:
        ConfigError: too many steps, or a prediction that cannot be inverted on this schedule.
    """
    of_x_t, of_output = (values.tolist() for values in x0_weights(prediction, schedule.alpha, schedule.sigma))
    # Numbers of the host: no value crosses from the device in the loop.
    alphas, sigmas = schedule.alpha.tolist(), schedule.sigma.tolist()
    timesteps = sampling_timesteps(schedule.num_train_timesteps, steps)
    x_t = noise
    for i, t in enumerate(timesteps):
        levels = torch.full((len(noise),), t, dtype=torch.int64, device=noise.device)
        if guidance == 1.0:
            output = predict(x_t, levels, labels)
        else:
            output = predict_both(predict, x_t, levels, labels, num_classes)
        is_last = i + 1 == len(timesteps)
        # The last step ends at the predicted x0: alpha = 1, sigma = 0.
        alpha, sigma = alphas[t], sigmas[t]
        next_alpha, next_sigma = (1.0, 0.0) if is_last else (alphas[timesteps[i + 1]], sigmas[timesteps[i + 1]])
        added = 0.0 if is_last else eta * _posterior_std(alpha, sigma, next_alpha, next_sigma)
        fresh = None
        if added > 0.0:
            shape = tuple(noise.shape[1:])
            fresh = philox.normal(seed, i, image_ids, Purpose.SAMPLE, shape, noise.dtype)
        x_t, _, _ = solver_step(
            output.to(x_t.dtype),
            x_t,
            to_m=(of_x_t[t], of_output[t]),
            next_weights=_next_weights(alpha, sigma, next_alpha, next_sigma, added),
            guidance=None if guidance == 1.0 else guidance,
            clip=1.0 if clip_x0 else 0.0,
            noise=fresh,
            keep_m=False,
            kernels=kernels,
        )
    return x_t


def _next_weights(
    alpha: float, sigma: float, next_alpha: float, next_sigma: float, added: float
) -> tuple[float, float, float, float, float]:
    """Weights of (x_t, x0, -, -, fresh noise) in the next x_t, whose other noise is (x_t - alpha x0) / sigma."""
    kept = math.sqrt(max(next_sigma**2 - added**2, 0.0)) / sigma if next_sigma > 0.0 else 0.0
    return kept, next_alpha - kept * alpha, 0.0, 0.0, added


def _posterior_std(alpha: float, sigma: float, next_alpha: float, next_sigma: float) -> float:
    """Standard deviation of ancestral sampling: Song et al. 2021, equation 16 with eta = 1, for any alpha and sigma."""
    return next_sigma / sigma * math.sqrt(max(sigma**2 - (alpha / next_alpha * next_sigma) ** 2, 0.0))
