"""`megadiff sample --quantization int8`: nearly the same pictures, on any layout without shards, and clear refusals."""

import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from megadiff.models.build import build_network
from megadiff.models.int8 import held_bytes, quantize_int8
from tests.engine.runs import RUN_SECONDS, tiny_config, train_well
from tests.engine.sample_jobs import request, request_run, sample
from tests.pool import WorkerPool

Pools = Mapping[int, WorkerPool]
INT8 = ("--quantization", "int8")
UNET = {
    # a DiT's fields at their defaults
    "model__patch_size": 2,
    "model__hidden_size": 128,
    "model__num_layers": 6,
    "model__num_heads": 4,
    "model__mlp_ratio": 4.0,
    "model__name": "unet",
    "model__input_size": 8,
    "model__block_out_channels": (8, 16),
    "model__layers_per_block": 1,
    "model__attention_head_dim": 8,
    "model__norm_num_groups": 4,
}


@pytest.fixture(scope="module")
def dit(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dit")
    train_well(pools[1], tiny_config(train__steps=60), path)
    return path


@pytest.fixture(scope="module")
def unet(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unet")
    train_well(pools[1], tiny_config(train__steps=30, **UNET), path)
    return path


@pytest.fixture
def run_dir(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def images_of(pool: WorkerPool, run_dir: Path, output: Path, *arguments: str) -> Tensor:
    report = sample(pool, run_dir, "--num-images", "2", "--output", str(output), *arguments)
    assert not report.error, report.error
    assert report.images is not None
    return report.images


def psnr(found: Tensor, expected: Tensor) -> float:
    """dB; pixels span 2."""
    return float(10 * torch.log10(4 / (found - expected).square().mean()))


def printed_run(argv: list[str]) -> str:
    """The command on every rank of a pool; what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        error = request_run(argv)
    assert not error, error
    return printed.getvalue()


def bytes_line(pool: WorkerPool, run_dir: Path, output: Path, *arguments: str) -> str:
    """What rank 0 says about the network's size."""
    argv = ["--checkpoint", str(run_dir), "--num-images", "1", "--output", str(output), *INT8, *arguments]
    printed = pool.run(printed_run, RUN_SECONDS, argv=argv)
    lines = [line for text in printed for line in text.splitlines() if line.startswith("quantization")]
    assert len(lines) == 1, printed
    return lines[0]


def run_without_torchao(argv: list[str]) -> str:
    with mock.patch.dict(sys.modules, {"torchao.quantization": None}):
        return request_run(argv)


@pytest.mark.parametrize("run_dir", ["dit", "unet"], indirect=True)
def test_pictures_change_but_little(pools: Pools, run_dir: Path, tmp_path: Path) -> None:
    plain, none, ours = (
        images_of(pools[1], run_dir, tmp_path, *flags) for flags in ([], ["--quantization", "none"], INT8)
    )
    assert torch.equal(plain, none)
    assert 40 < psnr(ours, plain) < 100


@pytest.mark.parametrize("run_dir", ["dit", "unet"], indirect=True)
@pytest.mark.parametrize("flags", [(), ("--pipeline-model-parallel-size", "2")], ids=["dp2", "pp2"])
def test_two_ranks_make_the_same_pictures(pools: Pools, run_dir: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """In batches of the same size: float sums differ a little between sizes, and now and then an input then rounds to
    the next of 255 numbers."""
    expected = images_of(pools[1], run_dir, tmp_path, *INT8, "--batch-size", "5")
    found = images_of(pools[2], run_dir, tmp_path, *INT8, "--batch-size", "10" if flags else "5", *flags)
    assert (found - expected).abs().max() < 1e-5
    assert psnr(images_of(pools[2], run_dir, tmp_path, *INT8, "--batch-size", "3", *flags), expected) > 50


@pytest.mark.parametrize("run_dir", ["dit", "unet"], indirect=True)
def test_one_line_tells_the_bytes_of_the_whole_network(pools: Pools, run_dir: Path, tmp_path: Path) -> None:
    line = bytes_line(pools[1], run_dir, tmp_path)
    pattern = r"quantization int8: the network takes ([\d,]+) bytes instead of ([\d,]+) \(ratio 0\.(\d{3})\)"
    match = re.match(pattern, line)
    assert match, line
    after, before = (int(number.replace(",", "")) for number in match.groups()[:2])
    chain = build_network(tiny_config(**(UNET if run_dir.name.startswith("unet") else {})).model, 0)
    assert before == held_bytes(chain)
    quantize_int8(chain)
    assert after == held_bytes(chain) and abs(after / before - int(match[3]) / 1000) < 1e-3
    for flags in ([], ["--pipeline-model-parallel-size", "2"]):
        assert bytes_line(pools[2], run_dir, tmp_path, *flags) == line


def test_a_list_notes_the_quantization_and_makes_its_pictures_anew(pools: Pools, dit: Path, tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text("\n".join(json.dumps({"class": label, "seed": 3}) for label in range(5)), encoding="utf-8")
    found = {}
    for name in ("none", "int8"):
        flags = ["--requests", str(path), "--output", str(tmp_path / "out"), "--quantization", name]
        assert not request(pools[1], dit, *flags)
        with Image.open(tmp_path / "out" / "000002.png") as picture:
            assert json.loads(picture.info["megadiff"])["quantization"] == name
            found[name] = np.asarray(picture).astype(int)
    assert 0 < np.abs(found["none"] - found["int8"]).max() < 64


def test_tensor_parallel_shards_are_refused(pools: Pools, dit: Path) -> None:
    for more in ([], ["--sequence-parallel"]):
        error = sample(pools[2], dit, *INT8, "--tensor-model-parallel-size", "2", *more).error
        assert error.startswith("ConfigError: --quantization int8 needs --tensor-model-parallel-size 1 instead of 2,")
        assert "\n" not in error


def test_a_missing_torchao_is_told_before_anything_is_made(pools: Pools, dit: Path, tmp_path: Path) -> None:
    argv = ["--checkpoint", str(dit), *INT8, "--output", str(tmp_path / "out")]
    for error in pools[2].run(run_without_torchao, RUN_SECONDS, argv=argv):
        assert error.startswith("ConfigError: int8 quantization needs torchao") and "megadiff[int8]" in error
    assert not (tmp_path / "out").exists()
    assert not sample(pools[2], dit, "--num-images", "1", "--output", str(tmp_path / "out")).error
