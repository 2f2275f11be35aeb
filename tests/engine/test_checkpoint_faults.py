"""Failing saves, damaged and hostile checkpoints: refused with one sentence, and nothing that was there is lost."""

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megadiff.checkpoint import writer
from megadiff.checkpoint.writer import hash_file
from megadiff.config.schema import Config
from tests.engine.runs import (
    RUN_SECONDS,
    RunReport,
    checkpoint,
    checkpoints,
    log_steps,
    on_rank,
    run,
    stored,
    tiny_config,
    train_run,
    train_well,
)
from tests.engine.sample_jobs import sample
from tests.pool import WorkerPool

Pools = Mapping[int, WorkerPool]


def test_b23_the_last_two_of_six_checkpoints_are_left(pools: Pools, tmp_path: Path) -> None:
    """On two ranks, so that a deletion by each rank would show."""
    config = tiny_config(train__steps=12, checkpoint__save_every_steps=2, checkpoint__keep_last=2)
    train_well(pools[2], config, tmp_path)
    assert checkpoints(tmp_path) == ["latest", "step_00000010", "step_00000012"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_00000012"


def test_b23_the_checkpoint_that_a_run_was_resumed_from_stays(pools: Pools, tmp_path: Path) -> None:
    settings = {"checkpoint__save_every_steps": 2, "checkpoint__keep_last": 1}
    train_well(pools[1], tiny_config(train__stop_at_step=4, **settings), tmp_path)
    assert checkpoints(tmp_path) == ["latest", "step_00000004"]
    train_well(pools[1], tiny_config(train__stop_at_step=8, **settings), tmp_path)
    assert checkpoints(tmp_path) == ["latest", "step_00000004", "step_00000008"]


@contextlib.contextmanager
def _disk_full_at_save(number: int) -> Iterator[None]:
    """The given save of this process (counted from 1) finds no space."""
    save_file, calls = writer.save_file, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == number:
            raise OSError(28, "No space left on device")
        save_file(*arguments)

    with mock.patch.object(writer, "save_file", failing):
        yield


def train_on_a_full_disk(config: Config, run_dir: Path, rank: int, save_number: int) -> RunReport:
    """The job for the pool: one rank's disk is full at one save."""
    with on_rank(rank, _disk_full_at_save(save_number)):
        return train_run(config, run_dir)


@pytest.mark.parametrize("rank", [0, 1])
def test_b23_a_save_that_fails_on_one_rank_fails_on_all_and_costs_nothing(
    pools: Pools, tmp_path: Path, rank: int
) -> None:
    config = tiny_config(train__steps=12, checkpoint__save_every_steps=2, checkpoint__keep_last=2)
    reports = pools[2].run(train_on_a_full_disk, RUN_SECONDS, config=config, run_dir=tmp_path, rank=rank, save_number=4)
    for report in reports:
        assert report.error.startswith("CheckpointError: cannot write")
        assert "No space left" in report.error and f"rank_{rank:05d}" in report.error
    visible = [name for name in checkpoints(tmp_path) if not name.startswith(".")]
    assert visible == ["latest", "step_00000004", "step_00000006"]
    for step in (4, 6):
        stored(checkpoint(tmp_path, step))
    report = train_well(pools[2], config, tmp_path)
    assert len(report.sample_ids) == 6
    assert checkpoints(tmp_path)[-1] == "step_00000012" and log_steps(tmp_path) == list(range(1, 13))


def test_a_checkpoints_folder_that_cannot_be_made_ends_every_rank(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    report = run(pools[2], tiny_config(train__steps=9), tmp_path)
    assert report.error.startswith("CheckpointError: cannot save under")
    assert (tmp_path / "checkpoints").read_text() == "a file"


class Hostile:
    """A pickle of this makes a folder when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def good_run(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one good checkpoint of step 2, by two ranks."""
    run_dir = tmp_path_factory.mktemp("good")
    train_well(pools[2], tiny_config(train__stop_at_step=2), run_dir)
    return run_dir


@pytest.fixture
def run_dir(good_run: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(good_run, tmp_path / "run"))


FILES = ("index.json", "rank_00000.safetensors", "rank_00001.safetensors", "../latest")


def refused_everywhere(pools: Pools, run_dir: Path, word: str) -> None:
    """Neither training nor sampling takes the checkpoint, on any number of ranks; both name what is wrong."""
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for error in (
        run(pools[1], tiny_config(), run_dir).error,
        run(pools[2], tiny_config(), run_dir).error,
        sample(pools[1], run_dir, "--num-images", "1").error,
    ):
        assert error.startswith("CheckpointError: ") and word in error, error
        assert "\n" not in error
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert after == before, "a refused checkpoint must leave the run folder alone"


def test_the_undamaged_checkpoint_is_taken(pools: Pools, run_dir: Path) -> None:
    """The baseline of the tests below."""
    assert not sample(pools[1], run_dir, "--num-images", "1").error
    train_well(pools[1], tiny_config(train__stop_at_step=3), run_dir)


@pytest.mark.parametrize("name", FILES[:3])
def test_one_byte_less_is_refused(pools: Pools, run_dir: Path, name: str) -> None:
    path = checkpoint(run_dir, 2) / name
    path.write_bytes(path.read_bytes()[:-1])
    refused_everywhere(pools, run_dir, name)


@pytest.mark.parametrize("name", FILES)
def test_b26_a_pickle_under_any_name_is_refused_and_never_runs(
    pools: Pools, run_dir: Path, tmp_path: Path, name: str
) -> None:
    marker = tmp_path / "marker"
    (checkpoint(run_dir, 2) / name).write_bytes(pickle.dumps(Hostile(marker)))
    refused_everywhere(pools, run_dir, Path(name).name)
    assert not marker.exists()


def test_b26_a_pickle_with_the_right_length_and_checksum_never_runs(
    pools: Pools, run_dir: Path, tmp_path: Path
) -> None:
    marker, folder = tmp_path / "marker", checkpoint(run_dir, 2)
    path = folder / "rank_00001.safetensors"
    path.write_bytes(pickle.dumps(Hostile(marker)))
    index = json.loads((folder / "index.json").read_text())
    index["files"][path.name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    (folder / "index.json").write_text(json.dumps(index))
    refused_everywhere(pools, run_dir, path.name)
    assert not marker.exists()


def test_b26_a_pickle_instead_of_the_class_names_never_runs(pools: Pools, run_dir: Path, tmp_path: Path) -> None:
    """Sampling reads them; training writes them anew."""
    marker = tmp_path / "marker"
    (run_dir / "classes.json").write_bytes(pickle.dumps(Hostile(marker)))
    report = sample(pools[1], run_dir, "--num-images", "1")
    assert report.error.startswith("DataError: ") and "classes.json" in report.error
    train_well(pools[1], tiny_config(train__stop_at_step=3), run_dir)
    assert not marker.exists()


def test_the_hostile_pickle_works(tmp_path: Path) -> None:
    """Otherwise the tests above could not fail."""
    pickle.loads(pickle.dumps(Hostile(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_a_checkpoint_of_another_network_is_refused(pools: Pools, run_dir: Path) -> None:
    """Its index claims to be of our network, but a tensor has another shape."""
    path = checkpoint(run_dir, 2) / "index.json"
    index = json.loads(path.read_text())
    index["config"]["model"]["num_classes"] = 4
    path.write_text(json.dumps(index))
    config = tiny_config(model__num_classes=4)
    error = run(pools[1], config, run_dir).error
    assert error.startswith("CheckpointError") and "embed.label.weight" in error
    error = sample(pools[1], run_dir, "--num-images", "1").error
    assert error.startswith(("CheckpointError", "DataError"))


def test_a_missing_tensor_is_named(pools: Pools, run_dir: Path) -> None:
    path = checkpoint(run_dir, 2) / "index.json"
    index = json.loads(path.read_text())
    del index["tensors"]["model/blocks.1.attn.out.bias"]
    path.write_text(json.dumps(index))
    error = run(pools[1], tiny_config(), run_dir).error
    assert error.startswith("CheckpointError") and "blocks.1.attn.out.bias" in error
