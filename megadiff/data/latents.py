"""A folder of safetensors files with latents and labels. No other format is opened: nothing can run."""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megadiff.data.dataset import hash_parts
from megadiff.errors import DataError

_FLOATS = ("F16", "BF16", "F32", "F64")
_INTEGERS = ("U8", "I8", "I16", "I32", "I64")


class LatentFolder:
    """Rows of the memory-mapped tensors `latents` (N, C, H, W) and `labels` (N,) of every file, by file name.

    Labels are read when the folder is opened, latents one row at a time when they are needed.
    """

    def __init__(self, folder: Path, in_channels: int, input_size: int, num_classes: int) -> None:
        """Open and check every file.

        Args:
            folder: holds `*.safetensors` files and nothing else but hidden files.
            in_channels: C.
            input_size: H and W.
            num_classes: labels are below it.

        Raises:
            DataError: names the file that is of another format, damaged, or of another shape.
        """
        self.paths = list_safetensors(folder)
        self.shape = (in_channels, input_size, input_size)
        shards = [open_shard(path, self.shape, num_classes) for path in self.paths]
        self._latents = [latents for latents, _ in shards]
        self._labels = torch.cat([labels for _, labels in shards])
        self._ends = list(accumulate(len(labels) for _, labels in shards))
        self.class_names = tuple(str(label) for label in range(num_classes))
        names = tuple(path.name for path in self.paths)
        content = (
            names,
            self._ends,
            [path.stat().st_size for path in self.paths],
            self._labels.numpy().tobytes(),
        )
        self.fingerprint = hash_parts(("latents", self.shape, num_classes, *content))

    @property
    def labels(self) -> list[int]:
        """The class of each row."""
        return [int(label) for label in self._labels]

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return len(self._labels)

    def load(self, index: int) -> tuple[Tensor, int]:
        """Return row `index` as ((C, H, W) float32, class); DataError names the file of a non-finite row."""
        file = bisect_right(self._ends, index)
        row = index - (self._ends[file - 1] if file else 0)
        latent: Tensor = self._latents[file][row].float()
        if not latent.isfinite().all():
            raise DataError(f"row {row} of {self.paths[file]} is not finite; write the latents again")
        return latent, int(self._labels[index])


def list_safetensors(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder by name, at least one; refuse any other file."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in files:
        if path.suffix != ".safetensors" or not path.is_file():
            raise DataError(f"{path} is no .safetensors file; move it out of the folder of latents")
    if not files:
        raise DataError(f"data.path = {folder} has no .safetensors files; write the latents there first")
    return files


def open_shard(path: Path, shape: tuple[int, int, int], num_classes: int) -> tuple[Any, Tensor]:
    """Open one file.

    Args:
        path: the file.
        shape: (C, H, W) of a latent.
        num_classes: labels are below it.

    Returns:
        A slice object of `latents` that reads rows on demand, and the labels (N,) int64.

    Raises:
        DataError: names the file and what is wrong with it.
    """
    try:
        file = safe_open(path, framework="pt")
        missing = {"latents", "labels"} - set(file.keys())
        if missing:
            raise DataError(f"{path} has no tensor {min(missing)!r}; store latents (N, C, H, W) and labels (N,)")
        latents, labels = file.get_slice("latents"), file.get_slice("labels")
        if latents.get_dtype() not in _FLOATS or labels.get_dtype() not in _INTEGERS:
            raise DataError(
                f"{path}: latents are {latents.get_dtype()} and labels {labels.get_dtype()}; store floats and integers"
            )
        check_shapes(path, tuple(latents.get_shape()), tuple(labels.get_shape()), shape)
        values = labels[:].long()
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read {path} as safetensors ({error}); write the file again") from error
    check_labels(path, values, num_classes)
    return latents, values


def check_shapes(path: Path, latents: tuple[int, ...], labels: tuple[int, ...], shape: tuple[int, int, int]) -> None:
    """Raise DataError unless latents are (N, *shape) and labels (N,) with the same N."""
    if latents[1:] != shape or labels != latents[:1]:
        raise DataError(
            f"{path}: latents {latents} and labels {labels} do not fit (N, {', '.join(map(str, shape))}) "
            "and (N,) of model.in_channels and model.input_size; change these or write the latents again"
        )


def check_labels(path: Path, labels: Tensor, num_classes: int) -> None:
    """Raise DataError unless every label is in [0, num_classes)."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise DataError(
            f"{path}: labels reach from {int(labels.min())} to {int(labels.max())}, but model.num_classes = "
            f"{num_classes} allows 0 to {num_classes - 1}; raise model.num_classes or correct the labels"
        )
