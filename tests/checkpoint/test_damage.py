"""Truncated, altered and hostile checkpoints are refused with the file's name, and nothing in them runs."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megadiff.checkpoint import CheckpointReader, find_checkpoint
from megadiff.checkpoint.writer import hash_file
from megadiff.errors import CheckpointError
from tests.checkpoint.saving import save, some_tensors


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one checkpoint of two rank files."""
    save(tmp_path / "run" / "checkpoints", 100, {"model": some_tensors()})
    return tmp_path / "run"


def load(run: Path) -> None:
    with CheckpointReader(find_checkpoint(run)) as reader:
        reader.config()
        reader.verify()
        for name in reader.names("model"):
            reader.read("model", name)


def test_the_undamaged_checkpoint_loads(run: Path) -> None:
    load(run)


@pytest.mark.parametrize("name", ["index.json", "rank_00000.safetensors", "rank_00001.safetensors"])
def test_truncation_by_one_byte_names_the_file(run: Path, name: str) -> None:
    path = run / "checkpoints" / "step_00000100" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=name):
        load(run)


@pytest.mark.parametrize("name", ["index.json", "rank_00000.safetensors", "rank_00001.safetensors"])
def test_a_missing_file_is_named(run: Path, name: str) -> None:
    (run / "checkpoints" / "step_00000100" / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load(run)


def test_a_flipped_bit_is_found_by_the_rank_that_checks_the_file(run: Path) -> None:
    path = run / "checkpoints" / "step_00000100" / "rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    reader = CheckpointReader(find_checkpoint(run))
    reader.verify(0, 2)
    for part, parts in [(1, 2), (0, 1)]:
        with pytest.raises(CheckpointError, match="rank_00001"):
            reader.verify(part, parts)


class Marker:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/latest",
        "checkpoints/step_00000100/index.json",
        "checkpoints/step_00000100/rank_00000.safetensors",
        "checkpoints/step_00000100/rank_00001.safetensors",
    ],
)
def test_b26_a_pickle_under_any_name_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "executed"
    payload = pickle.dumps(Marker(marker))
    pickle.loads(payload)
    assert marker.exists(), "the payload of this test is harmless"
    marker.unlink()
    (run / name).write_bytes(payload)
    with pytest.raises(CheckpointError, match=Path(name).name):
        load(run)
    assert not marker.exists()


def test_b26_a_pickle_of_the_right_length_and_checksum_is_refused(run: Path, tmp_path: Path) -> None:
    """An attacker also adapts the index."""
    marker, folder = tmp_path / "executed", run / "checkpoints" / "step_00000100"
    rewrite(folder, lambda index: index["files"].update({"rank_00000.safetensors": replace_file(folder, marker)}))
    with pytest.raises(CheckpointError, match="rank_00000"):
        load(run)
    assert not marker.exists()


def replace_file(folder: Path, marker: Path) -> dict[str, Any]:
    path = folder / "rank_00000.safetensors"
    path.write_bytes(pickle.dumps(Marker(marker)))
    return {"bytes": path.stat().st_size, "sha256": hash_file(path)}


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def first_piece(index: dict[str, Any]) -> dict[str, Any]:
    piece: dict[str, Any] = index["tensors"]["model/a.weight"]["pieces"][0]
    return piece


@pytest.mark.parametrize(
    "change",
    [
        lambda index: first_piece(index).update(file="../../outside.safetensors"),
        lambda index: first_piece(index).update(file="/etc/rank_00000.safetensors"),
        lambda index: index["files"].update({"../rank_00000.safetensors": {"bytes": 0, "sha256": "0" * 64}}),
        lambda index: first_piece(index).update(file="rank_00007.safetensors"),
        lambda index: first_piece(index).update(key="model/a.bias#0"),
        lambda index: first_piece(index).update(key="nothing"),
        lambda index: first_piece(index).update(offset=[-1, 0]),
        lambda index: first_piece(index).update(offset=[0]),
        lambda index: first_piece(index).update(size=[9, 9]),
        lambda index: index["tensors"]["model/a.weight"]["pieces"].pop(),
        lambda index: index["tensors"]["model/a.weight"].update(dtype="float64"),
        lambda index: index["tensors"]["model/a.weight"].update(dtype="object"),
        lambda index: index.update(version=2),
        lambda index: index.update(format="other"),
        lambda index: index.update(step="100"),
        lambda index: index.update(surprise=1),
        lambda index: index.pop("files"),
        lambda index: index["config"].update(surprise=1),
        lambda index: index["config"]["train"].update(seed="x"),
    ],
)
def test_a_wrong_index_is_refused(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    rewrite(run / "checkpoints" / "step_00000100", change)
    with pytest.raises(CheckpointError):
        load(run)


@pytest.mark.parametrize("content", [b"../../elsewhere", b"step_00000100/..", b"", b"\xff\xfe", b"step_100"])
def test_latest_must_be_a_plain_checkpoint_name(run: Path, content: bytes) -> None:
    (run / "checkpoints" / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match="latest"):
        load(run)
