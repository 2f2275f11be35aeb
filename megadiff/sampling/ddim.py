"""DDIM sampling (Song et al. 2021) on a respaced grid of training timesteps."""

import torch
from torch import Tensor

from megadiff.diffusion.prediction import require_invertible, to_x0_and_noise
from megadiff.diffusion.schedule import NoiseSchedule
from megadiff.errors import ConfigError
from megadiff.ops import philox
from megadiff.ops.philox import Purpose
from megadiff.sampling.guidance import Predict, guided


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
) -> Tensor:
    """Turn noise into images with `steps` calls of `predict`; the last step ends exactly at the predicted x0.

    Args:
        predict: the network; called with a doubled batch unless guidance is 1. Only the first C channels of
            its output are used.
        schedule: the one of training.
        prediction: what the network predicts: eps, x0 or v.
        noise: (B, C, H, W), see initial_noise; its dtype is the one of the arithmetic.
        labels: (B,) int64.
        num_classes: fixes the null label.
        steps: 1 .. T.
        guidance: 1 is plain conditional sampling, 0 unconditional.
        eta: 0 is deterministic, 1 adds as much noise as ancestral sampling.
        clip_x0: clamp every predicted x0 to [-1, 1] (pixels, not latents).
        seed: of the noise that eta > 0 adds.
        image_ids: (B,) int64, which make that noise independent of the batch.

    Returns:
        (B, C, H, W) images in the dtype of `noise`.

    Raises:
        ConfigError: too many steps, or a prediction that cannot be inverted on this schedule.
    """
    require_invertible(prediction, schedule)
    # 0-dim CPU tensors mix with tensors of any device and dtype, so no value crosses to the host in the loop.
    schedule = schedule.to(torch.device("cpu"))
    predict_guided = guided(predict, num_classes, guidance)
    timesteps = sampling_timesteps(schedule.num_train_timesteps, steps)
    x_t = noise
    for i, t in enumerate(timesteps):
        alpha, sigma = schedule.alpha[t], schedule.sigma[t]
        output = predict_guided(x_t, torch.full_like(labels, t), labels)[:, : noise.shape[1]]
        x0, eps = to_x0_and_noise(prediction, output.to(x_t.dtype), x_t, alpha, sigma)
        if clip_x0:
            x0 = x0.clamp(-1.0, 1.0)
            eps = (x_t - alpha * x0) / sigma  # the noise that goes with the clipped x0 at this x_t
        if i + 1 == len(timesteps):
            break
        next_alpha, next_sigma = schedule.alpha[timesteps[i + 1]], schedule.sigma[timesteps[i + 1]]
        added = eta * _posterior_std(alpha, sigma, next_alpha, next_sigma)
        x_t = next_alpha * x0 + (next_sigma**2 - added**2).clamp(min=0.0).sqrt() * eps
        if eta > 0.0:
            shape = tuple(noise.shape[1:])
            x_t = x_t + added * philox.normal(seed, i, image_ids, Purpose.SAMPLE, shape, noise.dtype)
    return x0


def _posterior_std(alpha: Tensor, sigma: Tensor, next_alpha: Tensor, next_sigma: Tensor) -> Tensor:
    """Return the standard deviation of ancestral sampling, Song et al. 2021, equation 16 with eta = 1."""
    return next_sigma / sigma * (1.0 - (alpha / next_alpha) ** 2).clamp(min=0.0).sqrt()
