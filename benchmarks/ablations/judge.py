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
from torch import Tensor, nn
from torch.nn import functional

from megadiff.diffusion.prediction import to_x0_and_noise
from megadiff.diffusion.schedule import NoiseSchedule, schedule_of
from megadiff.engine.inference import Network
from megadiff.evaluation.distances import frechet_distance, kernel_distance
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


class FeatureNet(nn.Module):
    """A small convolutional classifier; the distances live in the input of its last layer, (B, 64)."""

    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 16, 3, stride=2, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden = nn.Linear(32 * math.ceil(size / 4) ** 2, 64)
        self.last = nn.Linear(64, classes)

    def features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [-1, 1] -> (B, 64)."""
        maps = functional.relu(self.second(functional.relu(self.first(images))))
        return functional.relu(self.hidden(maps.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [-1, 1] -> (B, classes) logits."""
        return self.last(self.features(images))


def train_features(pictures: Pictures, classes: int, steps: int) -> FeatureNet:
    """The feature network of a benchmark run, always from the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, channels, size, _ = pictures.images.shape
        network = FeatureNet(channels, classes, size)
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
        for step in range(steps):
            batch = pictures.batch(step, 64, 0)
            loss = functional.cross_entropy(network(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.eval().requires_grad_(False)


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
