"""B23: rotation counts complete checkpoints in numeric order and deletes only after a save has succeeded."""

from pathlib import Path

import pytest

from megadiff.checkpoint import checkpoint_folder, prune
from megadiff.errors import CheckpointError
from tests.checkpoint.saving import save, some_tensors

STATE = {"model": some_tensors()}


def steps(root: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step_")) for folder in root.glob("step_*"))


def test_b23_the_last_two_in_numeric_order_stay(tmp_path: Path) -> None:
    for step in range(2000, 12001, 2000):
        save(tmp_path, step, STATE, keep_last=2)
    assert steps(tmp_path) == [10000, 12000]


def test_b23_numeric_order_beyond_eight_digits(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step, STATE, keep_last=1)
    assert steps(tmp_path) == [100_000_000]


def test_b23_a_failing_last_save_deletes_nothing(tmp_path: Path) -> None:
    for step in range(2000, 10001, 2000):
        save(tmp_path, step, STATE, keep_last=2)
    with pytest.raises(CheckpointError):
        save(tmp_path, 12000, STATE, keep_last=2, fail=True)
    assert steps(tmp_path) == [8000, 10000]
    assert (tmp_path / "latest").read_text() == "step_00010000\n"
    save(tmp_path, 12000, STATE, keep_last=2)
    assert steps(tmp_path) == [10000, 12000]


def test_b23_incomplete_checkpoints_do_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, STATE)
    (checkpoint_folder(tmp_path, 3) / "rank_00001.safetensors").unlink()
    assert prune(tmp_path, 2) == []
    save(tmp_path, 4, STATE, keep_last=2)
    assert steps(tmp_path) == [2, 3, 4]


def test_b23_what_was_resumed_from_and_latest_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, STATE)
    source = checkpoint_folder(tmp_path, 10)
    save(tmp_path, 15, STATE, keep_last=2, protect=(source,))
    assert steps(tmp_path) == [10, 15, 30, 40]


def test_zero_keeps_all(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, STATE, keep_last=0)
    assert steps(tmp_path) == [1, 2, 3]
