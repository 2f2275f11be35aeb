"""A folder of safetensors files with latents and labels or texts. No other format is opened: nothing can run."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megadiff.data.dataset import hash_parts
from megadiff.data.tensor_files import TextShape, check_rows, join_text, open_tensor
from megadiff.diffusion.condition import Condition
from megadiff.errors import DataError

ConditionKind = Literal["class", "text", "none"]


@dataclass(frozen=True)
class Shard:
    """The opened tensors of one file; all but the labels are read when a row is asked for."""

    latents: Any
    labels: Tensor | None = None
    tokens: Any = None
    pooled: Any = None

    def __len__(self) -> int:
        return int(self.latents.get_shape()[0])

    def condition(self, row: int) -> Condition:
        """The class, the text (F,) float32, or 0 where there is neither."""
        if self.labels is not None:
            return int(self.labels[row])
        if self.tokens is None:
            return 0
        return join_text(self.tokens[row], None if self.pooled is None else self.pooled[row])


class LatentFolder:
    """Rows of the memory-mapped tensors of every file, by file name.

    Every file has `latents` (N, C, H, W), and `labels` (N,) or `tokens` (N, L, E) and `pooled` (N, P) as the network
    needs them. Labels are read when the folder is opened, the rest one row at a time when it is needed.
    """

    def __init__(
        self,
        folder: Path,
        in_channels: int,
        input_size: int,
        num_classes: int,
        condition: ConditionKind = "class",
        text: TextShape | None = None,
    ) -> None:
        """Open and check every file.

        Args:
            folder: holds `*.safetensors` files and nothing else but hidden files.
            in_channels: C.
            input_size: H and W.
            num_classes: labels are below it.
            condition: what the network reads beside the latents.
            text: shape of the texts, if it reads them.

        Raises:
            DataError: names the file that is of another format, damaged, or of another shape.
        """
        self.paths = list_safetensors(folder)
        self.shape, self.condition = (in_channels, input_size, input_size), condition
        self._shards = [open_shard(path, self.shape, num_classes, condition, text) for path in self.paths]
        self._ends = list(accumulate(len(shard) for shard in self._shards))
        self.class_names = tuple(str(label) for label in range(num_classes))
        content: list[object] = [
            tuple(path.name for path in self.paths),
            self._ends,
            [path.stat().st_size for path in self.paths],
        ]
        if condition == "class":
            content.append(torch.tensor(self.labels).numpy().tobytes())
        else:
            content += [condition, text]
        self.fingerprint = hash_parts(("latents", self.shape, num_classes, *content))

    @property
    def labels(self) -> list[int]:
        """The class of each row; empty where rows have none."""
        return [int(label) for shard in self._shards if shard.labels is not None for label in shard.labels]

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return self._ends[-1]

    def load(self, index: int) -> tuple[Tensor, Condition]:
        """Return row `index` as ((C, H, W) float32, class or text); DataError names the file of a non-finite row."""
        file = bisect_right(self._ends, index)
        row, shard = index - (self._ends[file - 1] if file else 0), self._shards[file]
        latent, condition = shard.latents[row].float(), shard.condition(row)
        for name, values in (("latents", latent), ("text", condition)):
            if isinstance(values, Tensor) and not values.isfinite().all():
                raise DataError(f"row {row} of {self.paths[file]} is not finite ({name}); write the file again")
        return latent, condition


def list_safetensors(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder by name, at least one; refuse any other file."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in files:
        if path.suffix != ".safetensors" or not path.is_file():
            raise DataError(f"{path} is no .safetensors file; move it out of the folder of latents")
    if not files:
        raise DataError(f"data.path = {folder} has no .safetensors files; write the latents there first")
    return files


def open_shard(
    path: Path, shape: tuple[int, int, int], num_classes: int, condition: ConditionKind, text: TextShape | None
) -> Shard:
    """Open one file; see `LatentFolder` for what it must hold.

    Raises:
        DataError: names the file and what is wrong with it.
    """
    expected = {"latents": shape} | (text.tensors() if text else {"labels": ()} if condition == "class" else {})
    try:
        file = safe_open(path, framework="pt")
        tensors = {name: open_tensor(file, path, name, expected) for name in expected}
        check_rows(path, tensors, expected)
        if condition != "class":
            return Shard(tensors["latents"], None, tensors.get("tokens"), tensors.get("pooled"))
        labels: Tensor = tensors["labels"][:].long()
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read {path} as safetensors ({error}); write the file again") from error
    check_labels(path, labels, num_classes)
    return Shard(tensors["latents"], labels)


def check_labels(path: Path, labels: Tensor, num_classes: int) -> None:
    """Raise DataError unless every label is in [0, num_classes)."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise DataError(
            f"{path}: labels reach from {int(labels.min())} to {int(labels.max())}, but model.num_classes = "
            f"{num_classes} allows 0 to {num_classes - 1}; raise model.num_classes or correct the labels"
        )
