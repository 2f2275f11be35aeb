"""A list of pictures on any layout: the same files, made once, and again only where something changed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.runs import tiny_config, train_well
from tests.engine.sample_jobs import request, sample
from tests.pool import WorkerPool

Pools = Mapping[int, WorkerPool]
REQUESTS: list[dict[str, Any]] = [
    {"class": 0, "seed": 5},
    {"class": 1, "seed": 6, "solver": "dpmpp_2m_sde", "steps": 4},
    {"class": 2, "seed": 5, "image": 3},
    {"class": 3, "seed": 2**40, "solver": "dpmpp_2m_sde", "steps": 4},
    {"class": 4, "seed": 9, "guidance": 1.0},
    {"class": 0, "seed": 1, "dynamic_steps": "spectrum", "steps": 12},
    {"class": 2, "seed": 2, "dynamic_steps": "spectrum", "steps": 12},
]


@pytest.fixture(scope="module")
def run_dir(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    train_well(pools[1], tiny_config(train__steps=20), path)
    return path


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    return write(tmp_path / "list.jsonl", REQUESTS)


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, requests)), encoding="utf-8")
    return path


def pixels(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)).astype(int) for path in sorted(folder.glob("*.png"))}


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, ["--batch-size", "1"]),
        (2, []),
        (2, ["--tensor-model-parallel-size", "2"]),
        (2, ["--pipeline-model-parallel-size", "2"]),
    ],
    ids=["one by one", "dp2", "tp2", "pp2"],
)
def test_every_layout_makes_the_same_files(
    pools: Pools, run_dir: Path, listed: Path, tmp_path: Path, world_size: int, flags: list[str]
) -> None:
    assert not request(pools[1], run_dir, "--requests", str(listed), "--output", str(tmp_path / "one"))
    assert not request(pools[world_size], run_dir, "--requests", str(listed), "--output", str(tmp_path / "two"), *flags)
    expected, found = pixels(tmp_path / "one"), pixels(tmp_path / "two")
    assert list(found) == [f"{number:06d}.png" for number in range(1, 8)] == list(expected)
    for name, picture in expected.items():
        assert np.abs(picture - found[name]).max() <= 1, name
    assert not list((tmp_path / "two").glob("*.partial"))


def test_a_line_is_the_picture_that_flags_make(pools: Pools, run_dir: Path, listed: Path, tmp_path: Path) -> None:
    assert not request(pools[1], run_dir, "--requests", str(listed), "--output", str(tmp_path / "list"))
    flags = ["--class", "1", "--num-images", "1", "--solver", "dpmpp_2m_sde", "--steps", "4", "--seed", "6"]
    assert not sample(pools[1], run_dir, *flags, "--output", str(tmp_path / "flags")).error
    found = pixels(tmp_path / "flags")["00000_1.png"]
    assert np.abs(found - pixels(tmp_path / "list")["000002.png"]).max() <= 1


def test_files_say_how_they_were_made(pools: Pools, run_dir: Path, listed: Path, tmp_path: Path) -> None:
    assert not request(pools[1], run_dir, "--requests", str(listed), "--output", str(tmp_path), "--weights", "raw")
    about = json.loads(Image.open(tmp_path / "000004.png").info["megadiff"])
    assert (about["condition"], about["seed"], about["image"], about["weights"]) == ("3", 2**40, 0, "raw")
    assert about["sampling"]["solver"] == "dpmpp_2m_sde" and about["sampling"]["steps"] == 4
    assert about["checkpoint"] == f"{run_dir.name}/step_00000020" and len(about["index_sha256"]) == 16


def test_done_pictures_are_kept_and_changed_lines_made_anew(
    pools: Pools, run_dir: Path, listed: Path, tmp_path: Path
) -> None:
    arguments = ["--requests", str(listed), "--output", str(tmp_path / "out")]

    def changed(pool: WorkerPool, *more: str) -> list[str]:
        """Numbers of the files that a run writes."""
        before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.png")}
        assert not request(pool, run_dir, *arguments, *more)
        after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.png")}
        return [name[5:6] for name in sorted(after) if after[name] != before.get(name)]

    assert changed(pools[1]) == list("1234567")
    assert changed(pools[1]) == []
    (tmp_path / "out" / "000002.png").unlink()
    (tmp_path / "out" / "000003.png").write_bytes(b"cut short")
    assert changed(pools[2]) == ["2", "3"]
    write(listed, [*REQUESTS[:4], {**REQUESTS[4], "seed": 10}, *REQUESTS[5:]])
    assert changed(pools[1]) == ["5"]
    assert changed(pools[1], "--weights", "raw") == list("1234567")


def test_bad_lines_are_told_after_the_good_ones(pools: Pools, run_dir: Path, listed: Path, tmp_path: Path) -> None:
    write(listed, [*REQUESTS[:1], {"class": 99}, *REQUESTS[1:2]])
    error = request(pools[1], run_dir, "--requests", str(listed), "--output", str(tmp_path / "out"))
    assert error == f"DataError: 1 of 3 lines of {listed} were left out, see above"
    assert sorted(pixels(tmp_path / "out")) == ["000001.png", "000003.png"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "--seed has no meaning beside --requests"),
        (["--num-images", "1"], "--num-images has no meaning beside --requests"),
        (["--class", "1"], "--class has no meaning beside --requests"),
        (["--streams", "4"], "--streams has no effect on a CPU"),
        (["--empty-cache-every", "20"], "--empty-cache-every has no effect on a CPU"),
        (["--streams", "0"], "--streams = 0 is too small; use 1 or more"),
    ],
)
def test_flags_that_say_nothing_here_are_refused(
    pools: Pools, run_dir: Path, listed: Path, flags: list[str], message: str
) -> None:
    assert request(pools[1], run_dir, "--requests", str(listed), *flags).startswith(f"ConfigError: {message}")


def test_streams_need_a_list(pools: Pools, run_dir: Path) -> None:
    assert sample(pools[1], run_dir, "--streams", "2").error.startswith("ConfigError: --streams and --empty-cache")


def test_a_later_batch_may_have_other_settings(pools: Pools, run_dir: Path, tmp_path: Path) -> None:
    """An order of the file that changes settings from line to line gives the pictures of each line alone."""
    whole = write(tmp_path / "whole.jsonl", REQUESTS)
    assert not request(pools[1], run_dir, "--requests", str(whole), "--output", str(tmp_path / "whole"))
    alone = write(tmp_path / "alone.jsonl", REQUESTS[2:3])
    assert not request(pools[1], run_dir, "--requests", str(alone), "--output", str(tmp_path / "alone"))
    expected = torch.from_numpy(pixels(tmp_path / "alone")["000001.png"])
    assert (torch.from_numpy(pixels(tmp_path / "whole")["000003.png"]) - expected).abs().max() <= 1
