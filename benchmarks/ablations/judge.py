"""How good a network is, whatever it predicts on whatever schedule: errors at fixed noise levels, and its samples.

The noise levels are angles phi = atan(sigma / alpha), equally spaced. At each there are the squared errors of the
picture and of the noise, as both follow from the network's answer. The validation loss is their sum, which treats the
two ends of a schedule alike (it is the squared error of v where the variance is kept); that of the noise alone is what
the plain recipe trains.
"""

import math
from dataclasses import dataclass

import torch
from pictures import Pictures

from megadiff.diffusion.prediction import to_x0_and_noise
from megadiff.diffusion.schedule import NoiseSchedule, schedule_of
from megadiff.engine.inference import Network
from megadiff.evaluation.distances import frechet_distance, kernel_distance
from megadiff.evaluation.features import FeatureNet
from megadiff.sampling.generate import ImageRequest

NUM_LEVELS = 10
BATCH = 128


@dataclass(frozen=True)
class Effort:
    """How much is measured: pictures of the validation loss, samples, and real pictures that they are compared with."""

    pictures: int
    samples: int
    real: int


@dataclass(frozen=True)
class Errors:
    """Mean squared errors at the fixed noise levels."""

    x0: float
    noise: float


class Judge:
    """Measures networks on held-out pictures, always with the same noise."""

    def __init__(self, features: FeatureNet, held_out: Pictures, effort: Effort) -> None:
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(held_out), generator=generator)
        self.features = features
        self.pictures = held_out.take(order[: effort.pictures])
        self.noise = torch.randn(NUM_LEVELS, *self.pictures.images.shape, generator=generator)
        real = held_out.take(order[: effort.real])
        self.real = features.features(real.images)
        # Classes as often as among the held-out pictures.
        self.conditions = held_out.labels[order.repeat(-(-effort.samples // len(order)))[: effort.samples]].tolist()

    def errors(self, network: Network) -> Errors:
        """Means over levels, pictures and elements."""
        config = network.config
        schedule, prediction = schedule_of(config), config.diffusion.prediction
        of_x0 = of_noise = 0.0
        for level, timestep in enumerate(timesteps_of_levels(schedule)):
            for rows in torch.arange(len(self.pictures)).split(BATCH):
                x0, noise, t = self.pictures.images[rows], self.noise[level, rows], torch.full_like(rows, timestep)
                alpha, sigma = schedule.at(t, x0)
                x_t = alpha * x0 + sigma * noise
                output = network.predict(x_t, t, self.pictures.labels[rows])
                found_x0, found_noise = to_x0_and_noise(prediction, output, x_t, alpha, sigma)
                of_x0 += float((found_x0 - x0).double().square().sum())
                of_noise += float((found_noise - noise).double().square().sum())
        count = NUM_LEVELS * self.pictures.images.numel()
        return Errors(of_x0 / count, of_noise / count)

    def distances(self, network: Network) -> tuple[float, float]:
        """Frechet and kernel distance of fresh samples to held-out pictures."""
        request = ImageRequest(self.conditions, range(len(self.conditions)), seed=0, batch_size=BATCH)
        features = self.features.features(network.generate(request))
        return frechet_distance(features, self.real), kernel_distance(features, self.real)


def timesteps_of_levels(schedule: NoiseSchedule) -> list[int]:
    """The timestep of a schedule whose angle is nearest to each level's, from little noise to much."""
    angles = torch.atan2(schedule.sigma, schedule.alpha)
    wanted = (torch.arange(NUM_LEVELS, dtype=torch.float64) + 0.5) / NUM_LEVELS * (math.pi / 2)
    return (angles[None] - wanted[:, None]).abs().argmin(1).tolist()
