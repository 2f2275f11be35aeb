"""Sets of pictures to be judged: the files of a folder, or the training data of a run; decoded when they are needed."""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from megadiff.data.dataset import Dataset, hash_parts
from megadiff.data.pixels import read_square_rgb, to_rgb, to_tensor
from megadiff.errors import DataError
from megadiff.ops.philox import permutation
from megadiff.sampling.images import to_uint8

SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})
GRID = "grid.png"  # the overview that `megadiff sample` lays beside its pictures
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
_SIDEWAYS = range(5, 9)  # EXIF orientations that swap width and height

T = TypeVar("T")
R = TypeVar("R")


class Images(Protocol):
    """A finite set of RGB pictures of one size."""

    @property
    def title(self) -> str:
        """Where they come from."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes with the bytes of the pictures, their order and their size."""
        ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Tensor:
        """(3, H, W) uint8; DataError names a picture that cannot be read."""
        ...


@dataclass(frozen=True)
class ImageFiles:
    """PNG and JPEG files below a folder.

    Attributes:
        folder: where they are.
        names: their paths in it, with slashes, sorted.
        digests: a hash of each file.
        size: height and width of all, after resizing.
        resized: whether they are cut to a square and resized; else they have the size already.
    """

    folder: Path
    names: tuple[str, ...]
    digests: tuple[str, ...]
    size: tuple[int, int]
    resized: bool

    @property
    def title(self) -> str:
        return str(self.folder)

    @property
    def fingerprint(self) -> str:
        return hash_parts(("files", self.size, self.resized, *self.digests))

    def __len__(self) -> int:
        return len(self.names)

    def load(self, index: int) -> Tensor:
        """Upright, on white; see `Images`."""
        path = self.folder / self.names[index]
        if self.resized:
            return read_square_rgb(path, self.size[0])
        try:
            with Image.open(path) as image:
                image.load()
                pixels = to_tensor(to_rgb(ImageOps.exif_transpose(image)))
        except _UNREADABLE as error:
            raise _unreadable(path, error) from error
        if pixels.shape[1:] != self.size:  # turned by a tag behind the pixels
            raise _other_size(path, (pixels.shape[1], pixels.shape[2]), "the others", self.size)
        return pixels

    def choose(self, count: int) -> "ImageFiles":
        """A subset, see `choose_rows`; sets of the same names have the same names chosen."""
        rows = choose_rows(len(self), count, self.title)
        return replace(
            self, names=tuple(self.names[row] for row in rows), digests=tuple(self.digests[row] for row in rows)
        )


@dataclass(frozen=True)
class TrainingImages:
    """Pictures that a run learns from, unaugmented; grey ones become three equal channels.

    Attributes:
        title: the run.
        dataset: pictures of 1 or 3 channels.
        rows: the members that count.
        fingerprint: of the pixels.
    """

    title: str
    dataset: Dataset
    rows: tuple[int, ...]
    fingerprint: str

    @property
    def size(self) -> tuple[int, int]:
        _, height, width = self.load(0).shape
        return height, width

    def __len__(self) -> int:
        return len(self.rows)

    def load(self, index: int) -> Tensor:
        return _load_rgb(self.dataset, self.rows[index])


def open_files(folder: Path, size: int | None, threads: int) -> ImageFiles:
    """Lists and hashes the PNG and JPEG files below a folder; hidden ones and `grid.png` are passed over.

    Args:
        size: cut every picture to its central square and resize it to so many pixels a side; None leaves them, and
            all must have one size.
        threads: read so many files at once.

    Raises:
        DataError: no folder, fewer than two pictures, one that is no picture, or several sizes.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give a folder of PNG or JPEG files")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if _counts(path, folder))
    if len(names) < 2:
        raise DataError(f"{folder} has {len(names)} PNG or JPEG files; give a folder with at least 2")
    with ThreadPoolExecutor(threads) as pool:
        digests, sizes = zip(*pool.map(lambda name: _inspect(folder / name), names), strict=True)
    if size is not None:
        return ImageFiles(folder, tuple(names), digests, (size, size), resized=True)
    for name, found in zip(names, sizes, strict=True):
        if found != sizes[0]:
            raise _other_size(folder / name, found, names[0], sizes[0])
    return ImageFiles(folder, tuple(names), digests, sizes[0], resized=False)


def open_training(title: str, dataset: Dataset, count: int | None) -> TrainingImages:
    """Wraps the data of a run and hashes its pixels.

    Args:
        count: use a subset of so many, see `choose_rows`.

    Raises:
        DataError: fewer than two pictures or than `count`, or latents.
    """
    if len(dataset) < 2:
        raise DataError(f"{title} has {len(dataset)} pictures; at least 2 are needed")
    channels = dataset.load(0)[0].shape[0]
    if channels not in (1, 3):
        raise DataError(f"{title} learns from latents of {channels} channels; give a folder of pictures")
    rows = range(len(dataset)) if count is None else choose_rows(len(dataset), count, title)
    digests = [_digest(_load_rgb(dataset, row)) for row in rows]
    return TrainingImages(title, dataset, tuple(rows), hash_parts(("pixels", *digests)))


def choose_rows(total: int, count: int, title: str) -> list[int]:
    """So many rows of a set in order, always the same ones, drawn at random: files are often sorted by class.

    Args:
        title: of the set, for the message.

    Raises:
        DataError: the set is smaller.
    """
    if total < count:
        raise DataError(f"--num-images = {count} exceeds the {total} pictures of {title}; lower it")
    return sorted(permutation(0, 0, total)[:count].tolist())


def batches(images: Images, batch_size: int, threads: int) -> Iterator[Tensor]:
    """All pictures in order, (B, 3, H, W) uint8, the last batch shorter; the next one is decoded meanwhile."""
    rows = [range(len(images))[start : start + batch_size] for start in range(0, len(images), batch_size)]
    with ThreadPoolExecutor(threads) as pool:
        yield from map(torch.stack, _ahead(pool, images.load, rows))


def _ahead(pool: ThreadPoolExecutor, work: Callable[[T], R], groups: Iterable[Sequence[T]]) -> Iterator[list[R]]:
    """Results a group, one group ahead of what is read."""
    waiting = None
    for group in groups:
        started = [pool.submit(work, item) for item in group]
        if waiting is not None:
            yield [future.result() for future in waiting]
        waiting = started
    if waiting is not None:
        yield [future.result() for future in waiting]


def _counts(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in SUFFIXES and path.name != GRID and not hidden and path.is_file()


def _inspect(path: Path) -> tuple[str, tuple[int, int]]:
    """Hash of the file, height and width of the upright picture."""
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            # Pillow decodes a whole PNG file to look for a tag behind the pixels.
            has_tags = image.format != "PNG" or "exif" in image.info
            sideways = has_tags and image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    return hashlib.sha256(content).hexdigest(), (width, height) if sideways else (height, width)


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read the image {path} ({error}); repair or remove the file")


def _other_size(path: Path, found: tuple[int, int], other: str, size: tuple[int, int]) -> DataError:
    return DataError(
        f"{path} has {found[0]} x {found[1]} pixels and {other} {size[0]} x {size[1]}; resize all with --size"
    )


def _load_rgb(dataset: Dataset, row: int) -> Tensor:
    return to_uint8(dataset.load(row)[0]).expand(3, -1, -1)


def _digest(image: Tensor) -> bytes:
    return hashlib.sha256(repr(image.shape).encode() + image.contiguous().numpy().tobytes()).digest()
