"""What every source of pictures offers, and the parts that several sources share."""

import difflib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megadiff.diffusion.condition import Condition
from megadiff.errors import DataError


class Dataset(Protocol):
    """A finite, indexable set of labelled pictures; the same on every rank."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of class k at position k."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash that changes when the content, its order or the classes change."""
        ...

    @property
    def labels(self) -> Sequence[int]:
        """The class of each picture; empty where pictures come with texts or nothing."""
        ...

    def __len__(self) -> int:
        """Return the number of pictures."""
        ...

    def load(self, index: int) -> tuple[Tensor, Condition]:
        """Return picture `index` as ((C, H, W) float32 in [-1, 1] or latents, class or text); raises DataError."""
        ...


@dataclass(frozen=True)
class InMemoryDataset:
    """Decoded pictures held as bytes.

    Attributes:
        pixels: (N, C, H, W) uint8.
        labels: the class of each picture.
        class_names: the name of class k at position k.
        fingerprint: see `Dataset`.
    """

    pixels: Tensor
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.labels)

    def load(self, index: int) -> tuple[Tensor, int]:
        """Return picture `index` as ((C, H, W) float32 in [-1, 1], class)."""
        return to_signed_unit(self.pixels[index]), self.labels[index]


def to_signed_unit(pixels: Tensor) -> Tensor:
    """Map uint8 0..255 to float32 -1..1, both ends exactly."""
    return pixels.float().div_(127.5).sub_(1.0)


def hash_parts(parts: Iterable[object]) -> str:
    """Return a hex digest of the parts; bytes are hashed as they are, anything else through repr."""
    digest = hashlib.sha256()
    for part in parts:
        content = bytes(part) if isinstance(part, bytes | memoryview) else repr(part).encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def choose_classes(requested: Sequence[str], available: Sequence[str], source: str) -> tuple[str, ...]:
    """Return the requested class names in their order, or all available ones if none is requested.

    Raises:
        DataError: a name is unknown (the message gives the nearest) or occurs twice.
    """
    for name in requested:
        if name not in available:
            raise DataError(f"data.classes: {source} has no class {name!r}; {nearest_name(name, available)}")
        if requested.count(name) > 1:
            raise DataError(f"data.classes names {name!r} {requested.count(name)} times; give each class once")
    return tuple(requested) or tuple(available)


def nearest_name(name: str, available: Iterable[str]) -> str:
    """Return the end of an error message that proposes the nearest of the available names."""
    names = sorted(available)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names[:20])}"


def require_folder(path: str | None, source: str, content: str) -> Path:
    """Return data.path as a folder that exists.

    Args:
        path: the setting.
        source: the value of data.name, for the message.
        content: what the folder should hold, for the message.
    """
    if path is None:
        raise DataError(f"data.name = {source} needs data.path, {content}; set data.path")
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"data.path = {path} is not a folder; give {content}")
    return folder
