"""Stored latents: read by row from safetensors files, and nothing but safetensors files."""

import io
import os
import pickle
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from megadiff.data.latents import LatentFolder
from megadiff.errors import DataError


def write_shard(path: Path, count: int, first: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    latents = (torch.arange(first, first + count).view(-1, 1, 1, 1) + torch.zeros(1, 4, 2, 2)).to(dtype)
    labels = torch.arange(first, first + count) % 5
    save_file({"latents": latents, "labels": labels}, path)
    return latents


def open_folder(folder: Path) -> LatentFolder:
    return LatentFolder(folder, in_channels=4, input_size=2, num_classes=5)


def test_rows_of_all_files_follow_each_other_by_file_name(tmp_path: Path) -> None:
    write_shard(tmp_path / "b.safetensors", 3, first=4, dtype=torch.bfloat16)
    write_shard(tmp_path / "a.safetensors", 4, first=0)
    write_shard(tmp_path / "c.safetensors", 0, first=7)
    write_shard(tmp_path / "d.safetensors", 2, first=7, dtype=torch.float16)
    dataset = open_folder(tmp_path)
    assert len(dataset) == 9 and len(dataset.class_names) == 5
    for index in range(9):
        latent, label = dataset.load(index)
        assert latent.dtype == torch.float32
        assert torch.equal(latent, torch.full((4, 2, 2), float(index)))
        assert label == index % 5


def test_opening_reads_no_latents(tmp_path: Path) -> None:
    """A row that is not finite is noticed when it is read, so opening cannot have read it."""
    latents = torch.zeros(2, 4, 2, 2)
    latents[1, 0, 0, 0] = float("nan")
    save_file({"latents": latents, "labels": torch.zeros(2).long()}, tmp_path / "a.safetensors")
    dataset = open_folder(tmp_path)
    dataset.load(0)
    with pytest.raises(DataError, match=r"row 1 of .*a\.safetensors is not finite"):
        dataset.load(1)


class Hostile:
    """Creates a marker file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def object_array(hostile: Hostile) -> bytes:
    stream = io.BytesIO()
    numpy.save(stream, numpy.array([hostile], dtype=object), allow_pickle=True)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["a.safetensors", "b.safetensors", "b.pt", "b.pkl", "b.npy", "b.npz", "index.json"])
@pytest.mark.parametrize("kind", ["pickle", "numpy"])
def test_b26_a_hostile_file_under_any_name_is_refused_and_runs_nothing(tmp_path: Path, name: str, kind: str) -> None:
    folder, marker = tmp_path / "latents", tmp_path / "marker"
    folder.mkdir()
    write_shard(folder / "a.safetensors", 3)
    content = pickle.dumps(Hostile(marker)) if kind == "pickle" else object_array(Hostile(marker))
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        open_folder(folder)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Hostile(marker)))
    assert marker.exists(), "the hostile file must be able to do harm, or this test proves nothing"


def test_a_file_truncated_by_one_byte_is_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", 3)
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"a\.safetensors"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"latents": torch.zeros(3, 4, 2, 2)}, "no tensor 'labels'"),
        (
            {"latents": torch.zeros(3, 3, 2, 2), "labels": torch.zeros(3).long()},
            r"\(3, 3, 2, 2\).*in_channels",
        ),
        (
            {"latents": torch.zeros(3, 4, 4, 4), "labels": torch.zeros(3).long()},
            r"\(3, 4, 4, 4\).*input_size",
        ),
        ({"latents": torch.zeros(3, 4, 2, 2), "labels": torch.zeros(2).long()}, r"labels \(2,\)"),
        ({"latents": torch.zeros(3, 4, 2, 2), "labels": torch.full((3,), 5)}, "num_classes = 5"),
        ({"latents": torch.zeros(3, 4, 2, 2), "labels": torch.full((3,), -1)}, "from -1 to -1"),
        ({"latents": torch.zeros(3, 4, 2, 2), "labels": torch.zeros(3)}, "labels are F32"),
        ({"latents": torch.zeros(3, 4, 2, 2).int(), "labels": torch.zeros(3).long()}, "latents are I32"),
    ],
)
def test_wrong_content_is_refused_with_the_file(tmp_path: Path, tensors: dict, message: str) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=rf"a\.safetensors.*{message}"):
        open_folder(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.safetensors files"):
        open_folder(tmp_path)


def test_the_fingerprint_follows_the_labels(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", 3)
    first = open_folder(tmp_path).fingerprint
    assert open_folder(tmp_path).fingerprint == first
    write_shard(tmp_path / "a.safetensors", 3, first=1)
    assert open_folder(tmp_path).fingerprint != first
