"""Published weight files of frozen networks, read as tensors alone; a file of another network is refused by name."""

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from megadiff.errors import CheckpointError


def read_weights(path: Path, setting: str, content: str) -> dict[str, Tensor]:
    """The tensors of a .pth or .safetensors file by name, on the CPU; nothing in it is run.

    Args:
        setting: what names the file, for the message.
        content: what the file should hold, for the message.

    Raises:
        CheckpointError: the file is missing, damaged, or no table of tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{setting} = {path} is not a file; give {content}")
    try:
        stored = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CheckpointError(f"cannot read {path} as weights alone: {line}; fetch it again") from error
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise CheckpointError(f"{path} holds no table of tensors; give {content}")
    return stored


def fill(network: nn.Module, stored: dict[str, Tensor], path: Path, content: str) -> None:
    """Copies what the network has, parameters and buffers, out of a file that may hold more.

    Args:
        stored: from `read_weights`.
        path: of the file, for the message.
        content: what the file should hold, for the message.

    Raises:
        CheckpointError: a tensor is missing or of another shape.
    """
    for name, own in network.state_dict().items():
        if name not in stored:
            raise CheckpointError(f"{path} has no tensor {name}; give {content}")
        if stored[name].shape != own.shape:
            found, expected = tuple(stored[name].shape), tuple(own.shape)
            raise CheckpointError(f"{path}: {name} has shape {found} where {expected} is expected; give {content}")
        own.copy_(stored[name])
