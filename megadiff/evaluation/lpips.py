"""LPIPS on VGG-16 (Zhang et al. 2018): the network is torchvision's file, the few weights on top are torchmetrics'."""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.errors import DataError
from megadiff.models.vgg import Vgg16, load_vgg16
from megadiff.models.weights import read_weights

_EPS = 1e-10  # in the length of a feature vector, as published


class Lpips(nn.Module):
    """The distance of pairs of pictures, version 0.1 of the published weights.

    Args:
        network: of features.
        weights: five, (C,) >= 0, one of each of its maps.
    """

    def __init__(self, network: Vgg16, weights: list[Tensor]) -> None:
        super().__init__()
        self.network = network
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)

    def forward(self, images: Tensor, others: Tensor) -> Tensor:
        """Twice (B, 3, H, W) in [-1, 1], at least 16 pixels a side -> (B,), eq. 1 of the paper."""
        distance = images.new_zeros(len(images))
        for first, second, weight in zip(self.network(images), self.network(others), self.weights, strict=True):
            difference = (_unit(first) - _unit(second)).square()
            distance = distance + torch.einsum("bchw,c->bhw", difference, weight).mean((1, 2))
        return distance


def load_lpips(path: Path, setting: str) -> Lpips:
    """The distance with torchvision's `vgg16` weights from a local file.

    Args:
        setting: what names the file, for the message.

    Raises:
        CheckpointError: the file is missing, damaged or of another network.
        DataError: torchmetrics, which ships the weights on top, is not installed.
    """
    heads = _heads_file()
    stored = read_weights(heads, "the weights of torchmetrics", "torchmetrics' own file")
    weights = [stored[f"lin{number}.model.1.weight"].flatten() for number in range(5)]
    return Lpips(load_vgg16(path, setting), weights).eval()


def _heads_file() -> Path:
    """Read as a file: what torchmetrics builds around it needs torchvision."""
    spec = find_spec("torchmetrics")
    if spec is None or spec.origin is None:
        raise DataError("--lpips needs torchmetrics; pip install 'megadiff[evaluate]'")
    return Path(spec.origin).parent / "functional" / "image" / "lpips_models" / "vgg.pth"


def _unit(maps: Tensor) -> Tensor:
    """Feature vectors of length 1 at each position."""
    return functional.normalize(maps, dim=1, eps=_EPS)
