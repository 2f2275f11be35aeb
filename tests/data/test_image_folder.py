"""Class folders of images."""

from pathlib import Path

import pytest
from PIL import Image

from megadiff.data.image_folder import ImageFolder
from megadiff.data.loader import BatchLoader
from megadiff.errors import DataError

COLOURS = {"cat": "red", "dog": "blue"}


def make_folder(root: Path, per_class: int = 3) -> Path:
    for name, colour in COLOURS.items():
        (root / name).mkdir()
        for number in range(per_class):
            suffix = ("png", "jpg", "webp")[number % 3]
            Image.new("RGB", (12, 10), colour).save(root / name / f"{number}.{suffix}")
    return root


def test_folders_are_classes_and_pixels_are_signed(tmp_path: Path) -> None:
    dataset = ImageFolder(make_folder(tmp_path), input_size=8)
    assert dataset.class_names == ("cat", "dog")
    assert len(dataset) == 6
    image, label = dataset.load(0)
    assert image.shape == (3, 8, 8) and label == 0
    assert image[:, 0, 0].tolist() == [1.0, -1.0, -1.0]
    assert [dataset.load(index)[1] for index in range(6)] == [0, 0, 0, 1, 1, 1]


def test_classes_select_and_order_folders(tmp_path: Path) -> None:
    dataset = ImageFolder(make_folder(tmp_path), 8, classes=("dog",))
    assert dataset.class_names == ("dog",) and len(dataset) == 3
    assert ImageFolder(tmp_path, 8, ("dog", "cat")).load(0)[0][2, 0, 0] == 1.0


def test_an_unknown_class_proposes_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'dogs'.*did you mean 'dog'"):
        ImageFolder(make_folder(tmp_path), 8, classes=("dogs",))


def test_a_class_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'dog' 2 times"):
        ImageFolder(make_folder(tmp_path), 8, classes=("dog", "cat", "dog"))


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "fish").mkdir()
    (tmp_path / "fish" / "notes.txt").write_text("soon")
    with pytest.raises(DataError, match=r"fish has no images"):
        ImageFolder(tmp_path, 8)


def test_a_folder_without_class_folders_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"no class folders"):
        ImageFolder(tmp_path, 8)


def test_captions_and_hidden_files_are_passed_over_but_not_images_of_other_formats(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "cat" / "0.txt").write_text("a red cat")
    (tmp_path / "cat" / ".DS_Store").write_bytes(b"\0")
    (tmp_path / ".cache").mkdir()
    assert len(ImageFolder(tmp_path, 8)) == 6
    Image.new("P", (4, 4)).save(tmp_path / "cat" / "moving.GIF")
    with pytest.raises(DataError, match=r"moving\.GIF has an unsupported format"):
        ImageFolder(tmp_path, 8)


def test_nested_folders_belong_to_their_class(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "cat" / "indoors").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "indoors" / "x.png")
    assert len(ImageFolder(tmp_path, 8)) == 7


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    first = ImageFolder(make_folder(tmp_path), 8).fingerprint
    assert ImageFolder(tmp_path, 8).fingerprint == first
    Image.new("RGB", (4, 4)).save(tmp_path / "dog" / "new.png")
    assert ImageFolder(tmp_path, 8).fingerprint != first


def test_b31_a_truncated_file_is_named_by_the_training_loop(tmp_path: Path) -> None:
    dataset = ImageFolder(make_folder(tmp_path), 8)
    bad = tmp_path / "dog" / "1.jpg"
    bad.write_bytes(bad.read_bytes()[:100])
    with BatchLoader(dataset, 0, 6, 3) as loader, pytest.raises(DataError, match=r"dog/1\.jpg"):
        next(loader)
