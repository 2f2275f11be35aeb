"""Networks of the tests of sampling: one that knows the pictures, one that is some smooth function."""

import math

import torch
from torch import Tensor

from megadiff.diffusion.prediction import target
from megadiff.diffusion.schedule import SCHEDULES, NoiseSchedule
from megadiff.sampling.grids import timestep_grid
from megadiff.sampling.guidance import Guidance, Predict
from megadiff.sampling.sampler import Sampler, initial_noise, make_calls

SHAPE = (2, 3, 3)
NUM_CLASSES = 3

# Every schedule, with and without pure noise at its end, and every prediction that says something there.
PAIRS = [
    (name, zero_end, prediction)
    for name, zero_end in [
        *((name, False) for name in SCHEDULES),
        *((name, True) for name in SCHEDULES if name != "flow"),
    ]
    for prediction in ("eps", "x0", "v", "flow")
    if prediction != "eps" or not (zero_end or name == "flow")
]


def sample(
    predict: Predict,
    schedule: NoiseSchedule,
    prediction: str = "v",
    num: int = 4,
    dtype: torch.dtype = torch.float64,
    ids: Tensor | None = None,
    steps: int = 5,
    guidance: float = 1.0,
    eta: float = 0.0,
    clip_x0: bool = False,
    solver: str = "ddim",
    spacing: str = "trailing",
    shift: float = 1.0,
    seed: int = 1,
) -> Tensor:
    """Images of the first ids with labels in turn."""
    image_ids = torch.arange(num) if ids is None else ids
    noise = initial_noise(1, image_ids, SHAPE, dtype)
    rule = Guidance(guidance, NUM_CLASSES)
    timesteps = timestep_grid(spacing, schedule, steps, shift)
    sampler = Sampler(make_calls(schedule, prediction, timesteps, solver, rule, eta), rule, clip_x0)
    return sampler(predict, noise, image_ids % NUM_CLASSES, seed, image_ids)


def true_images(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """One fixed picture a label."""
    pictures = torch.linspace(-1.0, 1.0, 4 * math.prod(SHAPE), dtype=torch.float64).view(4, *SHAPE)
    return pictures[labels].to(dtype)


def exact_denoiser(schedule: NoiseSchedule, prediction: str) -> Predict:
    """The answer of a network that knows the picture of every label."""

    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        x0 = true_images(labels, x_t.dtype)
        alpha, sigma = schedule.at(t, x_t)
        return target(prediction, x0, (x_t - alpha * x0) / sigma, alpha, sigma)

    return predict


def sees_text(images: Tensor) -> Tensor:
    """A detector that finds text everywhere."""
    return torch.ones(len(images), dtype=torch.bool)


def smooth_network(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """Some nonlinear function of each sample alone."""
    return (x_t + 0.3 * labels.view(-1, 1, 1, 1)).sin() * (1.0 + t.view(-1, 1, 1, 1) / 1000.0)
