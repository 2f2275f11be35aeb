"""The two sets of pictures that the recipes are compared on, each with a network of a size that suits it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fashion_mnist import is_complete
from pictures import Pictures, open_pictures, split
from torch import Tensor

from megadiff.data.fashion_mnist import FashionMnist
from megadiff.errors import DataError
from megadiff.sampling.images import save_png

_CLASSIFIER_PICTURES = 20_000
_LEAST_PICTURES = 10  # to train on, of a class of emoji


@dataclass(frozen=True)
class Subject:
    """Pictures and the network that learns them: a DiT with long skips, so that skips can be a row.

    Attributes:
        settings: of the run, by dotted key.
        stages: of the progressive row.
        training: pictures that the feature network learns from; the runs read the same ones, or more, by `settings`.
        held_out: pictures that no run sees.
    """

    settings: Mapping[str, Any]
    stages: list[dict[str, Any]]
    training: Pictures
    held_out: Pictures


def fashion_mnist(folder: Path, _: Path) -> Subject:
    """60,000 grey pictures of clothes in 10 classes; the test files are held out.

    Raises:
        DataError: the files were not fetched.
    """
    if not is_complete(folder):
        raise DataError(
            f"{folder} does not hold Fashion-MNIST; run `python benchmarks/fashion_mnist.py` once, or use --data emoji"
        )
    settings = {
        **_network(28, 4, channels=1, classes=10),
        "data.name": "fashion_mnist",
        "data.path": str(folder),
    }
    training = _load(FashionMnist(folder, 28, 1), _CLASSIFIER_PICTURES)
    return Subject(settings, _stages(12, 20, 28), training, _load(FashionMnist(folder, 28, 1, split="t10k"), 10_000))


def emoji(_: Path, work_dir: Path) -> Subject:
    """The embedded colour pictures in Unicode's larger classes; one in ten is held out, the others go into a folder."""
    training, held_out = split(open_pictures(16), 0)
    large = (training.labels.bincount() >= _LEAST_PICTURES).nonzero().flatten()
    training, held_out = _of_classes(training, large), _of_classes(held_out, large)
    folder = work_dir / "emoji"
    for index, (image, label) in enumerate(zip(training.images, training.labels.tolist(), strict=True)):
        path = folder / f"{label:03d}" / f"{index:05d}.png"
        if not path.exists():
            save_png(image, path)
    settings = {
        **_network(16, 2, channels=3, classes=len(large)),
        "data.name": "image_folder",
        "data.path": str(folder),
    }
    return Subject(settings, _stages(8, 12, 16), training, held_out)


def _network(size: int, patch: int, channels: int, classes: int) -> dict[str, Any]:
    return {
        "model.name": "dit",
        "model.input_size": size,
        "model.patch_size": patch,
        "model.in_channels": channels,
        "model.num_classes": classes,
        "model.hidden_size": 64,
        "model.num_layers": 5,
        "model.num_heads": 4,
        "model.long_skips": True,
    }


def _stages(*sizes: int) -> list[dict[str, Any]]:
    return [{"until": until, "input_size": size} for until, size in zip((0.4, 0.7, 1.0), sizes, strict=True)]


def _of_classes(pictures: Pictures, classes: Tensor) -> Pictures:
    """Those of some classes, which are numbered anew."""
    matches = pictures.labels[:, None] == classes
    kept = pictures.take(matches.any(1).nonzero().flatten())
    return Pictures(kept.images, matches[matches.any(1)].int().argmax(1))


def _load(dataset: FashionMnist, count: int) -> Pictures:
    samples = [dataset.load(index) for index in range(min(count, len(dataset)))]
    return Pictures(torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples]))


SUBJECTS = {"fashion_mnist": fashion_mnist, "emoji": emoji}
