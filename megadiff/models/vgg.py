"""The first half of VGG-19 as a frozen network of features for losses; weights come from torchvision's file."""

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from megadiff.errors import CheckpointError

# Channels of the convolutions up to relu3_3, by their number in torchvision's `features`; None where the map is halved.
_LAYERS: tuple[tuple[int, int, int] | None, ...] = (
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
# Of ImageNet in [0, 1], by which torchvision's weights were trained.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class VggFeatures(nn.Module):
    """relu3_3 of VGG-19 (Simonyan and Zisserman 2015): 256 channels at a quarter of the size."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleDict(
            {str(layer[0]): nn.Conv2d(layer[1], layer[2], 3, padding=1) for layer in _LAYERS if layer is not None}
        )
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(3, 1, 1), persistent=False)
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3 or 1, H, W) in [-1, 1], at least 4 pixels a side -> (B, 256, H / 4, W / 4)."""
        x = ((images + 1.0) / 2.0 - self.mean) / self.std  # grey pictures become three equal channels here
        for layer in _LAYERS:
            x = F.max_pool2d(x, 2) if layer is None else F.relu(self.features[str(layer[0])](x))
        return x


def load_vgg(path: Path) -> VggFeatures:
    """Reads torchvision's `vgg19` weights, as .pth or .safetensors; the layers after relu3_3 are left out.

    Raises:
        CheckpointError: the file is missing, damaged or of another network.
    """
    stored = _read(path)
    network = VggFeatures()
    for name, parameter in network.named_parameters():
        if name not in stored:
            raise CheckpointError(
                f"{path} has no tensor {name}, so it is not torchvision's vgg19; give its weight file"
            )
        if stored[name].shape != parameter.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(stored[name].shape)}, but vgg19 has {tuple(parameter.shape)}; give "
                "torchvision's vgg19 (without batch norm)"
            )
        parameter.data.copy_(stored[name])
    return network


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"diffusion.vgg_path = {path} is not a file; give torchvision's vgg19 weights")
    try:
        stored = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CheckpointError(f"cannot read {path} as weights alone: {line}; fetch it again") from error
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise CheckpointError(f"{path} holds no table of tensors; give torchvision's vgg19 weights")
    return stored
