"""The two sets of pictures that the recipes are compared on, and the small network that learns them."""

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

SIZE = 16  # pixels a side
_CLASSIFIER_PICTURES, _HELD_OUT_PICTURES = 20_000, 10_000
_LEAST_PICTURES = 10  # to train on, of a class of emoji


@dataclass(frozen=True)
class Subject:
    """Pictures and the network that learns them: a UNet, so that its skips can be a row.

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
        **_network(SIZE, channels=1, classes=10),
        "data.name": "fashion_mnist",
        "data.path": str(folder),
    }
    training = _load(FashionMnist(folder, SIZE, 1), _CLASSIFIER_PICTURES)
    held_out = _load(FashionMnist(folder, SIZE, 1, split="t10k"), _HELD_OUT_PICTURES)
    return Subject(settings, _stages(), training, held_out)


def emoji(_: Path, work_dir: Path) -> Subject:
    """The embedded colour pictures in Unicode's larger classes; one in ten is held out, the others go into a folder."""
    training, held_out = split(open_pictures(SIZE), 0)
    large = (training.labels.bincount() >= _LEAST_PICTURES).nonzero().flatten()
    training, held_out = _of_classes(training, large), _of_classes(held_out, large)
    folder = work_dir / "emoji"
    for index, (image, label) in enumerate(zip(training.images, training.labels.tolist(), strict=True)):
        path = folder / f"{label:03d}" / f"{index:05d}.png"
        if not path.exists():
            save_png(image, path)
    settings = {
        **_network(SIZE, channels=3, classes=len(large)),
        "data.name": "image_folder",
        "data.path": str(folder),
    }
    return Subject(settings, _stages(), training, held_out)


def _network(size: int, channels: int, classes: int) -> dict[str, Any]:
    return {
        "model.name": "unet",
        "model.input_size": size,
        "model.in_channels": channels,
        "model.num_classes": classes,
        "model.block_out_channels": (16, 32),
        "model.layers_per_block": 1,
        "model.attention_head_dim": 16,
        "model.norm_num_groups": 8,
    }


def _stages() -> list[dict[str, Any]]:
    return [
        {"until": until, "input_size": size} for until, size in ((0.4, SIZE // 2), (0.7, 3 * SIZE // 4), (1.0, SIZE))
    ]


def _of_classes(pictures: Pictures, classes: Tensor) -> Pictures:
    """Those of some classes, which are numbered anew."""
    matches = pictures.labels[:, None] == classes
    kept = pictures.take(matches.any(1).nonzero().flatten())
    return Pictures(kept.images, matches[matches.any(1)].int().argmax(1))


def _load(dataset: FashionMnist, count: int) -> Pictures:
    samples = [dataset.load(index) for index in range(min(count, len(dataset)))]
    return Pictures(torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples]))


SUBJECTS = {"fashion_mnist": fashion_mnist, "emoji": emoji}
