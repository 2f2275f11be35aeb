"""Which files of a folder are judged, what their pictures are, and which sets are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megadiff.data.dataset import InMemoryDataset
from megadiff.errors import DataError
from megadiff.evaluation.images import batches, open_files, open_training
from megadiff.sampling.images import to_uint8
from tests.evaluation.sets import noise, save_set


def test_pictures_are_found_recursively_without_grids_and_hidden_ones(tmp_path: Path) -> None:
    images = noise(6)
    names = ("b/0.png", "a/x/1.PNG", "grid.png", "a/grid.png", ".features/2.png", "c.png")
    save_set(tmp_path, images, names)
    Image.new("RGB", (16, 16), "red").save(tmp_path / "d.jpg")
    (tmp_path / "note.txt").write_text("no picture")
    files = open_files(tmp_path, None, threads=2)
    assert files.names == ("a/x/1.PNG", "b/0.png", "c.png", "d.jpg") and files.size == (16, 16)
    assert torch.equal(files.load(0), to_uint8(images[1])) and torch.equal(files.load(2), to_uint8(images[5]))
    assert files.load(3)[0].float().mean() > 200 > 50 > files.load(3)[1].float().mean()


def test_batches_hold_all_in_order(tmp_path: Path) -> None:
    images = noise(7)
    files = open_files(save_set(tmp_path, images), None, threads=1)
    found = list(batches(files, 3, threads=2))
    assert [len(batch) for batch in found] == [3, 3, 1]
    assert torch.equal(torch.cat(found), to_uint8(images))


def test_a_size_cuts_squares_and_resizes(tmp_path: Path) -> None:
    save_set(tmp_path, noise(1, 16), ("0.png",))
    wide = np.zeros((8, 24, 3), dtype=np.uint8)
    wide[:, 8:16] = 255
    Image.fromarray(wide).save(tmp_path / "1.png")
    files = open_files(tmp_path, 4, threads=1)
    assert files.size == (4, 4) and files.load(1).shape == (3, 4, 4)
    assert files.load(1).float().mean() > 240, "the middle is kept"
    assert files.fingerprint != open_files(tmp_path, 8, threads=1).fingerprint


def test_b29_a_picture_stands_upright(tmp_path: Path) -> None:
    """Also when sizes are compared, which are read without decoding."""
    tall = np.zeros((8, 4, 3), dtype=np.uint8)
    tall[0] = 255
    Image.fromarray(tall).save(tmp_path / "0.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned to the left
    Image.fromarray(np.rot90(tall).copy()).save(tmp_path / "1.png", exif=exif)
    files = open_files(tmp_path, None, threads=1)
    assert files.size == (8, 4) and torch.equal(files.load(0), files.load(1))


def test_b30_grey_and_transparent_ones_become_rgb(tmp_path: Path) -> None:
    Image.new("L", (4, 4), 100).save(tmp_path / "0.png")
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "1.png")
    files = open_files(tmp_path, None, threads=1)
    assert files.load(0).unique().tolist() == [100] and files.load(1).unique().tolist() == [255]


def test_a_subset_is_always_the_same_and_not_the_first_ones(tmp_path: Path) -> None:
    files = open_files(save_set(tmp_path, noise(40, 4)), None, threads=2)
    chosen = files.choose(10)
    assert chosen == files.choose(10) and len(chosen) == 10 and list(chosen.names) == sorted(chosen.names)
    assert chosen.names != files.names[:10] and chosen.fingerprint != files.fingerprint
    assert chosen.digests[3] == files.digests[files.names.index(chosen.names[3])]
    with pytest.raises(DataError, match=r"--num-images = 41 exceeds the 40 pictures of .*; lower it"):
        files.choose(41)


def test_what_is_no_set_of_pictures_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent is not a folder"):
        open_files(tmp_path / "absent", None, threads=1)
    save_set(tmp_path / "one", noise(1))
    with pytest.raises(DataError, match="has 1 PNG or JPEG files; give a folder with at least 2"):
        open_files(tmp_path / "one", None, threads=1)
    save_set(tmp_path / "mixed", noise(2), ("0.png", "1.png"))
    save_set(tmp_path / "mixed", noise(1, 8), ("2.png",))
    with pytest.raises(DataError, match=r"mixed/2\.png has 8 x 8 pixels and 0\.png 16 x 16; resize all with --size"):
        open_files(tmp_path / "mixed", None, threads=1)


@pytest.mark.parametrize("size", [None, 8])
def test_b31_a_damaged_file_is_named(tmp_path: Path, size: int | None) -> None:
    save_set(tmp_path, noise(3))
    (tmp_path / "00001.png").write_text("no picture")
    with pytest.raises(DataError, match=r"cannot read the image .*00001\.png") as error:
        open_files(tmp_path, size, threads=1)
    assert "\n" not in str(error.value)
    save_set(tmp_path, noise(3))
    whole = (tmp_path / "00002.png").read_bytes()
    (tmp_path / "00002.png").write_bytes(whole[: len(whole) // 2])
    files = open_files(tmp_path, size, threads=1)  # its header is whole
    with pytest.raises(DataError, match=r"cannot read the image .*00002\.png"):
        list(batches(files, 2, threads=1))


def test_the_data_of_a_run_become_rgb_and_are_known_by_their_pixels() -> None:
    grey = to_uint8(noise(12, 4)[:, :1])
    dataset = InMemoryDataset(grey, (0,) * 12, ("all",), "made up")
    images = open_training("digits of runs/a", dataset, None)
    assert len(images) == 12 and images.size == (4, 4) and images.title == "digits of runs/a"
    assert torch.equal(images.load(5), grey[5].expand(3, -1, -1))
    assert len(open_training("a", dataset, 5)) == 5
    changed = grey.clone()
    changed[7, 0, 0, 0] ^= 1
    other = InMemoryDataset(changed, (0,) * 12, ("all",), "made up")
    assert open_training("a", other, None).fingerprint != images.fingerprint
    with pytest.raises(DataError, match="--num-images = 13 exceeds the 12 pictures of a"):
        open_training("a", dataset, 13)


def test_latents_are_no_pictures() -> None:
    latents = InMemoryDataset(torch.zeros(3, 4, 2, 2, dtype=torch.uint8), (0, 0, 0), ("all",), "")
    with pytest.raises(DataError, match="learns from latents of 4 channels; give a folder of pictures"):
        open_training("runs/a", latents, None)
