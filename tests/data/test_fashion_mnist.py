"""Fashion-MNIST's published file format, written small."""

import gzip
import struct
from pathlib import Path

import pytest
import torch

from megadiff.data.fashion_mnist import CLASS_NAMES, FashionMnist
from megadiff.errors import DataError

NUM = 20


def write_idx(path: Path, shape: tuple[int, ...], content: bytes, type_code: int = 8) -> None:
    header = bytes((0, 0, type_code, len(shape))) + struct.pack(f">{len(shape)}I", *shape)
    path.write_bytes(gzip.compress(header + content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pixels = bytes(index * 12 for index in range(NUM) for _ in range(28 * 28))
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", (NUM, 28, 28), pixels)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", (NUM,), bytes(index % 10 for index in range(NUM)))
    return tmp_path


def test_32_pixels_pad_with_black_and_repeat_the_channel(folder: Path) -> None:
    dataset = FashionMnist(folder, input_size=32, in_channels=3)
    image, label = dataset.load(13)
    assert len(dataset) == NUM and label == 3 and dataset.class_names[3] == "dress"
    assert image.shape == (3, 32, 32) and image.dtype == torch.float32
    torch.testing.assert_close(image[:, 2:30, 2:30], torch.full((3, 28, 28), 13 * 12 / 127.5 - 1))
    inside = torch.zeros(32, 32, dtype=torch.bool)
    inside[2:30, 2:30] = True
    assert (image[:, ~inside] == -1.0).all()


@pytest.mark.parametrize("size", [8, 28, 29, 64])
def test_any_size_keeps_the_values_of_the_centre(folder: Path, size: int) -> None:
    image, _ = FashionMnist(folder, size, in_channels=1).load(10)
    assert image.shape == (1, size, size)
    torch.testing.assert_close(image[0, size // 2, size // 2], torch.tensor(120 / 127.5 - 1))


def test_classes_select_and_renumber(folder: Path) -> None:
    dataset = FashionMnist(folder, 28, 1, classes=("bag", "trouser"))
    assert dataset.class_names == ("bag", "trouser")
    assert dataset.labels == [1, 0, 1, 0]
    assert dataset.load(1)[0][0, 0, 0] == pytest.approx(8 * 12 / 127.5 - 1)


def test_an_unknown_class_proposes_the_nearest(folder: Path) -> None:
    with pytest.raises(DataError, match=r"'sneakers'.*did you mean 'sneaker'"):
        FashionMnist(folder, 28, 1, classes=("sneakers",))


def test_the_test_split_is_read_on_request(folder: Path) -> None:
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz"):
        FashionMnist(folder, 28, 1, split="t10k")


@pytest.mark.parametrize("damage", ["missing", "truncated", "not gzip", "short content", "other type"])
def test_a_bad_file_is_named(folder: Path, damage: str) -> None:
    path = folder / "train-labels-idx1-ubyte.gz"
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(content[:-9])
        case "not gzip":
            path.write_bytes(b"\x80\x04K\x01.")
        case "short content":
            write_idx(path, (NUM,), bytes(NUM - 1))
        case "other type":
            write_idx(path, (NUM,), bytes(4 * NUM), type_code=0x0C)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz"):
        FashionMnist(folder, 28, 1)


def test_labels_that_do_not_belong_to_the_images_are_refused(folder: Path) -> None:
    write_idx(folder / "train-labels-idx1-ubyte.gz", (NUM + 1,), bytes(NUM + 1))
    with pytest.raises(DataError, match=r"20 images and 21 labels"):
        FashionMnist(folder, 28, 1)
    assert len(CLASS_NAMES) == 10
