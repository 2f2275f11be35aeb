"""The embedded pictures as tensors, a part of them held out: what benchmarks of methods train on and judge by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.data.batch import Batch
from megadiff.data.emoji import open_emoji
from megadiff.data.order import SampleOrder
from megadiff.ops.philox import permutation

HELD_OUT = 10  # one picture of so many


@dataclass(frozen=True)
class Pictures:
    """Pixels (N, C, H, W) float32 in [-1, 1] and classes (N,) int64."""

    images: Tensor
    labels: Tensor

    def take(self, indices: Tensor) -> "Pictures":
        """Some of them."""
        return Pictures(self.images[indices], self.labels[indices])

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The batch of a step in the order that a run of the seed would have."""
        positions = torch.arange(step * size, (step + 1) * size)
        chosen = self.take(SampleOrder(seed, len(self)).indices(positions))
        return Batch(chosen.images, chosen.labels, positions)

    def __len__(self) -> int:
        return len(self.labels)


def open_pictures(size: int) -> Pictures:
    """All embedded pictures, with their sub-groups in Unicode as classes."""
    dataset = open_emoji(size, "subgroup")
    samples = [dataset.load(index) for index in range(len(dataset))]
    return Pictures(torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples]))


def split(pictures: Pictures, seed: int) -> tuple[Pictures, Pictures]:
    """Pictures to train on, and others held out at random."""
    order = permutation(seed, 0, len(pictures))
    count = len(pictures) // HELD_OUT
    return pictures.take(order[count:]), pictures.take(order[:count])
