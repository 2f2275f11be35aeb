"""VGG-19 up to its third block and VGG-16 as frozen networks of features; weights come from torchvision's files."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megadiff.models.weights import fill, read_weights

_Layers = tuple[tuple[int, int, int] | None, ...]

# Channels of the convolutions by their number in torchvision's `features`; None where the map is halved. Up to
# relu3_3 both networks are the same.
_TO_RELU3_3: _Layers = (
    (0, 3, 64),
    (2, 64, 64),
    None,
    (5, 64, 128),
    (7, 128, 128),
    None,
    (10, 128, 256),
    (12, 256, 256),
    (14, 256, 256),
)
_VGG16: _Layers = (
    *_TO_RELU3_3,
    None,
    (17, 256, 512),
    (19, 512, 512),
    (21, 512, 512),
    None,
    (24, 512, 512),
    (26, 512, 512),
    (28, 512, 512),
)
# Of ImageNet in [0, 1], by which torchvision's weights were trained.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class _Vgg(nn.Module):
    """The convolutions of a table (Simonyan and Zisserman 2015), frozen."""

    mean: Tensor
    std: Tensor

    def __init__(self, layers: _Layers) -> None:
        super().__init__()
        self.layers = layers
        self.features = nn.ModuleDict(
            {str(layer[0]): nn.Conv2d(layer[1], layer[2], 3, padding=1) for layer in layers if layer is not None}
        )
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(3, 1, 1), persistent=False)
        self.requires_grad_(False)

    def maps(self, images: Tensor) -> list[Tensor]:
        """The map before each halving, and the last one."""
        x = ((images + 1.0) / 2.0 - self.mean) / self.std  # grey pictures become three equal channels here
        found = []
        for layer in self.layers:
            if layer is None:
                found.append(x)
                x = F.max_pool2d(x, 2)
            else:
                x = F.relu(self.features[str(layer[0])](x))
        return [*found, x]


class VggFeatures(_Vgg):
    """relu3_3 of VGG-19: 256 channels at a quarter of the size."""

    def __init__(self) -> None:
        super().__init__(_TO_RELU3_3)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3 or 1, H, W) in [-1, 1], at least 4 pixels a side -> (B, 256, H / 4, W / 4)."""
        return self.maps(images)[-1]


class Vgg16(_Vgg):
    """relu1_2, relu2_2, relu3_3, relu4_3 and relu5_3 of VGG-16."""

    def __init__(self) -> None:
        super().__init__(_VGG16)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) in [-1, 1], at least 16 a side -> maps of 64, 128, 256, 512, 512 channels, halved each time."""
        return self.maps(images)


def load_vgg(path: Path) -> VggFeatures:
    """Reads torchvision's `vgg19` weights, as .pth or .safetensors; the layers after relu3_3 are left out.

    Raises:
        CheckpointError: the file is missing, damaged or of another network.
    """
    network, content = VggFeatures(), "torchvision's vgg19 weights (without batch norm)"
    fill(network, read_weights(path, "diffusion.vgg_path", content), path, content)
    return network


def load_vgg16(path: Path, setting: str) -> Vgg16:
    """Reads torchvision's `vgg16` weights, as .pth or .safetensors, without the classifier.

    Args:
        setting: what names the file, for the message.

    Raises:
        CheckpointError: the file is missing, damaged or of another network.
    """
    network, content = Vgg16(), "torchvision's vgg16 weights (without batch norm)"
    fill(network, read_weights(path, setting, content), path, content)
    return network
