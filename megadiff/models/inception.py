"""InceptionV3 as published FIDs use it: the network of the 2015 TensorFlow release, not torchvision's retrained one.

Szegedy et al. 2016, figures 5 to 7 and table 1. It differs from torchvision's `inception_v3` in what its weights need:
average pools leave the padding out of the count, the last block pools by maximum, and there are 1008 classes. Names of
parameters are those of `pt_inception-2015-12-05-6726825d.pth`. Knows nothing of statistics.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megadiff.models.weights import fill, read_weights

SIZE = 299  # pixels a side, to which pictures are resized
CONTENT = "pt_inception-2015-12-05-6726825d.pth, the InceptionV3 of published FIDs (1008 classes)"
_NUM_CLASSES = 1008
_BATCH_NORM_EPS = 1e-3


class InceptionOutput(NamedTuple):
    """Features (B, 2048) of the last pool, and logits (B, 1008)."""

    features: Tensor
    logits: Tensor


class _Conv(NamedTuple):
    """A convolution with batch norm and ReLU: name, output channels, kernel, and whether it halves the map."""

    name: str
    channels: int
    kernel: tuple[int, int] = (1, 1)
    halves: bool = False

    @property
    def padding(self) -> tuple[int, int]:
        """As much as keeps the size, and none where the map is halved."""
        return (0, 0) if self.halves else (self.kernel[0] // 2, self.kernel[1] // 2)


# A step is a convolution, a pair whose outputs are put beside each other, or a pool.
_Step = _Conv | tuple[_Conv, _Conv] | str
_Branches = tuple[tuple[_Step, ...], ...]

_SQUARE, _WIDE, _HIGH = (3, 3), (1, 7), (7, 1)
_FORK = {
    name: (_Conv(f"{name}a", 384, (1, 3)), _Conv(f"{name}b", 384, (3, 1))) for name in ("branch3x3_2", "branch3x3dbl_3")
}


def _figure_5(pooled: int) -> _Branches:
    return (
        (_Conv("branch1x1", 64),),
        (_Conv("branch5x5_1", 48), _Conv("branch5x5_2", 64, (5, 5))),
        (_Conv("branch3x3dbl_1", 64), _Conv("branch3x3dbl_2", 96, _SQUARE), _Conv("branch3x3dbl_3", 96, _SQUARE)),
        ("average", _Conv("branch_pool", pooled)),
    )


def _figure_6(width: int) -> _Branches:
    return (
        (_Conv("branch1x1", 192),),
        (_Conv("branch7x7_1", width), _Conv("branch7x7_2", width, _WIDE), _Conv("branch7x7_3", 192, _HIGH)),
        (
            _Conv("branch7x7dbl_1", width),
            _Conv("branch7x7dbl_2", width, _HIGH),
            _Conv("branch7x7dbl_3", width, _WIDE),
            _Conv("branch7x7dbl_4", width, _HIGH),
            _Conv("branch7x7dbl_5", 192, _WIDE),
        ),
        ("average", _Conv("branch_pool", 192)),
    )


def _figure_7(pool: str) -> _Branches:
    return (
        (_Conv("branch1x1", 320),),
        (_Conv("branch3x3_1", 384), _FORK["branch3x3_2"]),
        (_Conv("branch3x3dbl_1", 448), _Conv("branch3x3dbl_2", 384, _SQUARE), _FORK["branch3x3dbl_3"]),
        (pool, _Conv("branch_pool", 192)),
    )


_REDUCTION_TO_17: _Branches = (
    (_Conv("branch3x3", 384, _SQUARE, True),),
    (_Conv("branch3x3dbl_1", 64), _Conv("branch3x3dbl_2", 96, _SQUARE), _Conv("branch3x3dbl_3", 96, _SQUARE, True)),
    ("halve",),
)
_REDUCTION_TO_8: _Branches = (
    (_Conv("branch3x3_1", 192), _Conv("branch3x3_2", 320, _SQUARE, True)),
    (
        _Conv("branch7x7x3_1", 192),
        _Conv("branch7x7x3_2", 192, _WIDE),
        _Conv("branch7x7x3_3", 192, _HIGH),
        _Conv("branch7x7x3_4", 192, _SQUARE, True),
    ),
    ("halve",),
)
_BLOCKS: tuple[tuple[str, _Branches], ...] = (
    ("Mixed_5b", _figure_5(32)),
    ("Mixed_5c", _figure_5(64)),
    ("Mixed_5d", _figure_5(64)),
    ("Mixed_6a", _REDUCTION_TO_17),
    ("Mixed_6b", _figure_6(128)),
    ("Mixed_6c", _figure_6(160)),
    ("Mixed_6d", _figure_6(160)),
    ("Mixed_6e", _figure_6(192)),
    ("Mixed_7a", _REDUCTION_TO_8),
    ("Mixed_7b", _figure_7("average")),
    ("Mixed_7c", _figure_7("maximum")),
)


def pool(x: Tensor, kind: str) -> Tensor:
    """A 3 x 3 pool: at every place the `average` of the pixels there are, or the `maximum`; `halve` by the maximum.

    Args:
        x: (B, C, H, W).
    """
    if kind == "average":
        return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
    return F.max_pool2d(x, 3, stride=1, padding=1) if kind == "maximum" else F.max_pool2d(x, 3, stride=2)


class _ConvNorm(nn.Module):
    def __init__(self, in_channels: int, channels: int, kernel: tuple[int, int], stride: int, padding: tuple[int, int]):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=_BATCH_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class _Block(nn.Module):
    """Branches side by side, their outputs one after the other in the channels."""

    def __init__(self, in_channels: int, branches: _Branches) -> None:
        super().__init__()
        self.branches = branches
        self.channels = 0
        for branch in branches:
            self.channels += self._add(in_channels, branch)

    def _add(self, channels: int, branch: tuple[_Step, ...]) -> int:
        """Makes the layers of a branch and returns its output channels."""
        for step in branch:
            if isinstance(step, str):
                continue
            parts = (step,) if isinstance(step, _Conv) else step
            for part in parts:
                stride = 2 if part.halves else 1
                self.add_module(part.name, _ConvNorm(channels, part.channels, part.kernel, stride, part.padding))
            channels = sum(part.channels for part in parts)
        return channels

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._run(x, branch) for branch in self.branches], 1)

    def _run(self, x: Tensor, branch: tuple[_Step, ...]) -> Tensor:
        for step in branch:
            if isinstance(step, str):
                x = pool(x, step)
            elif isinstance(step, _Conv):
                x = self.get_submodule(step.name)(x)
            else:
                x = torch.cat([self.get_submodule(part.name)(x) for part in step], 1)
        return x


class InceptionV3(nn.Module):
    """The whole network, in evaluation mode and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = _ConvNorm(3, 32, _SQUARE, 2, (0, 0))
        self.Conv2d_2a_3x3 = _ConvNorm(32, 32, _SQUARE, 1, (0, 0))
        self.Conv2d_2b_3x3 = _ConvNorm(32, 64, _SQUARE, 1, (1, 1))
        self.Conv2d_3b_1x1 = _ConvNorm(64, 80, (1, 1), 1, (0, 0))
        self.Conv2d_4a_3x3 = _ConvNorm(80, 192, _SQUARE, 1, (0, 0))
        channels = 192
        for name, branches in _BLOCKS:
            block = _Block(channels, branches)
            self.add_module(name, block)
            channels = block.channels
        self.fc = nn.Linear(channels, _NUM_CLASSES)
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> InceptionOutput:
        """(B, 3, H, W) in [-1, 1], any size -> features and logits.

        Published inception scores come from logits without the bias of the last layer, and so do these.
        """
        x = self.Conv2d_1a_3x3(resize(images))
        x = pool(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(x)), "halve")
        x = pool(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)), "halve")
        for block in self._blocks():
            x = block(x)
        features = x.mean((2, 3))
        return InceptionOutput(features, F.linear(features, self.fc.weight))

    def _blocks(self) -> Iterator[nn.Module]:
        return (self.get_submodule(name) for name, _ in _BLOCKS)


def resize(images: Tensor) -> Tensor:
    """(B, 3, H, W) -> (B, 3, 299, 299), bilinear without smoothing, as published figures do."""
    return F.interpolate(images, size=(SIZE, SIZE), mode="bilinear", align_corners=False, antialias=False)


def load_inception(path: Path, setting: str) -> InceptionV3:
    """Reads the weights that published FIDs use, as .pth or .safetensors.

    Args:
        setting: what names the file, for the message.

    Raises:
        CheckpointError: the file is missing, damaged, or of another InceptionV3, such as torchvision's.
    """
    network, stored = InceptionV3(), read_weights(path, setting, CONTENT)
    # The count of training batches plays no part, and older files lack it.
    counts = {name: value for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")}
    fill(network, {**stored, **counts}, path, CONTENT)
    return network
