"""Spaces in which pictures are compared: a frozen network with a name and a fingerprint. (B, C, H, W) pictures."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.data.dataset import hash_parts
from megadiff.data.order import SampleOrder

_BATCH = 64


class Features(NamedTuple):
    """What a network says about pictures.

    Attributes:
        values: (N, D) points.
        logits: (N, K) of classes, None where the network tells none.
    """

    values: Tensor
    logits: Tensor | None


@dataclass(frozen=True, eq=False)
class FeatureSpace:
    """A fixed network for pictures.

    Attributes:
        name: as figures name it.
        network: (B, 3, H, W) float32 in [-1, 1] to `Features`; frozen, in evaluation mode.
        fingerprint: changes with the weights and with how pictures are prepared.
        is_fid: whether its Frechet distance is what published work calls FID.
    """

    name: str
    network: nn.Module
    fingerprint: str
    is_fid: bool = False


def fingerprint_of(network: nn.Module, *parts: object) -> str:
    """A hash of all weights and buffers by name, and of the parts."""
    tensors = ((name, value.dtype, tuple(value.shape), _bytes(value)) for name, value in network.state_dict().items())
    return hash_parts((*parts, *(field for fields in tensors for field in fields)))


def _bytes(value: Tensor) -> bytes:
    return bytes(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


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


def train_features(images: Tensor, labels: Tensor, classes: int, steps: int) -> FeatureNet:
    """A feature network of labelled pictures, always from the same seed.

    Args:
        images: (N, C, S, S) float32 in [-1, 1].
        labels: (N,) int64 below `classes`.
        steps: of AdamW with batches of 64.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = FeatureNet(images.shape[1], classes, images.shape[2])
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
        order = SampleOrder(0, len(labels))
        for step in range(steps):
            rows = order.indices(torch.arange(step * _BATCH, (step + 1) * _BATCH))
            loss = functional.cross_entropy(network(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.eval().requires_grad_(False)
