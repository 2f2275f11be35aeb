"""`megadiff sample`: the same pictures in any batch and on any layout, and clear refusals."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from megadiff.cli_sample import _SAMPLING, _settings
from megadiff.sampling.images import to_uint8
from tests.engine.runs import checkpoint, stored, tiny_config, train_well
from tests.engine.sample_jobs import sample
from tests.pool import WorkerPool

ROOT = Path(__file__).parent.parent
NAMES = ["cat", "dog", "clock", "7", "two words/slash"]
Pools = Mapping[int, WorkerPool]


@pytest.fixture(scope="module")
def run_dir(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run whose weights and moving average differ, with names for its classes."""
    path = tmp_path_factory.mktemp("run")
    train_well(pools[1], tiny_config(ema__decay=0.8, ema__warmup=False, train__steps=60), path)
    (path / "classes.json").write_text(json.dumps(NAMES))
    return path


def images_of(pool: WorkerPool, run_dir: Path, output: Path, *arguments: str) -> torch.Tensor:
    """The images (N, C, H, W) of a request that must succeed."""
    report = sample(pool, run_dir, "--output", str(output), *arguments)
    assert not report.error, report.error
    return report.images


def test_files_and_grid_hold_the_images_by_class(pools: Pools, run_dir: Path, tmp_path: Path) -> None:
    images = images_of(pools[1], run_dir, tmp_path, "--num-images", "2")
    assert images.shape == (10, 3, 4, 4) and images.isfinite().all()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files[0] == "00000_cat.png" and files[5] == "00005_clock.png"
    assert files[9] == "00009_two_words_slash.png" and files[10:] == ["grid.png"]
    for name, image in zip(files, images, strict=False):
        with Image.open(tmp_path / name) as picture:
            found = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        assert torch.equal(found, to_uint8(image))
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size[1] > 2 * grid.size[0], "rows are classes"


@pytest.mark.parametrize(("trained", "sampled"), [("flash_attn", "auto"), ("flash", "auto"), ("math", "math")])
def test_what_only_the_training_machine_had_is_not_asked_for(trained: str, sampled: str) -> None:
    backends = {"train__attention_backend": trained, "train__norm_backend": "apex"}
    config = tiny_config(train__precision="bf16", parallel__zero_stage=1, model__qk_norm=True, **backends)
    layout = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False}
    settings = _settings(config, argparse.Namespace(**dict.fromkeys(_SAMPLING), **layout)).train
    assert (settings.precision, settings.attention_backend, settings.norm_backend) == ("fp32", sampled, "torch")


def test_the_folder_is_named_after_the_seed(pools: Pools, run_dir: Path) -> None:
    report = sample(pools[1], run_dir, "--num-images", "1", "--class", "cat", "--seed", "3")
    assert not report.error and (run_dir / "samples_seed_3" / "grid.png").exists()


def test_an_image_does_not_depend_on_its_batch(pools: Pools, run_dir: Path, tmp_path: Path) -> None:
    """Also with the noise that eta adds."""
    arguments = ["--num-images", "3", "--eta", "1.0"]
    whole = images_of(pools[1], run_dir, tmp_path, *arguments)
    parts = images_of(pools[1], run_dir, tmp_path, *arguments, "--batch-size", "4")
    assert (whole - parts).abs().max() < 1e-4
    few = images_of(pools[1], run_dir, tmp_path, "--num-images", "2", "--eta", "1.0", "--class", "cat")
    assert (whole[:2] - few).abs().max() < 1e-4
    assert (whole[0] - whole[1]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, []),
        (2, ["--tensor-model-parallel-size", "2"]),
        (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        (2, ["--pipeline-model-parallel-size", "2"]),
    ],
    ids=["dp2", "tp2", "tp2+sp", "pp2"],
)
def test_every_layout_makes_the_same_images(
    pools: Pools, run_dir: Path, tmp_path: Path, world_size: int, flags: list[str]
) -> None:
    """Of one image a class, five, so that two data ranks do not share them evenly."""
    expected = images_of(pools[1], run_dir, tmp_path, "--num-images", "1", "--seed", "5")
    found = images_of(pools[world_size], run_dir, tmp_path, "--num-images", "1", "--seed", "5", *flags)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("flags", [[], ["--tensor-model-parallel-size", "2"]], ids=["dp2", "tp2"])
def test_reused_features_are_the_same_on_every_layout_that_can(
    pools: Pools, run_dir: Path, tmp_path: Path, flags: list[str]
) -> None:
    arguments = ["--num-images", "1", "--steps", "12", "--cache-threshold", "0.9"]
    expected = images_of(pools[1], run_dir, tmp_path / "one", *arguments)
    found = images_of(pools[2], run_dir, tmp_path / "two", *arguments, *flags)
    assert (found - expected).abs().max() < 1e-4
    assert (expected - images_of(pools[1], run_dir, tmp_path / "all", *arguments[:-2])).abs().max() > 1e-4


@pytest.mark.slow
def test_torchrun_starts_it(pools: Pools, run_dir: Path, tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "launch/sample.py"]
    arguments = ["--checkpoint", str(run_dir), "--output", str(tmp_path / "out"), "--num-images", "1"]
    flags = ["--tensor-model-parallel-size", "2"]
    done = subprocess.run(
        [sys.executable, *command, *arguments, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote 5 images and") == 1
    expected = images_of(pools[1], run_dir, tmp_path / "one", "--num-images", "1")
    for index, image in enumerate(expected):
        (path,) = (tmp_path / "out").glob(f"{index:05d}_*.png")
        with Image.open(path) as picture:
            found = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        assert (found.int() - to_uint8(image).int()).abs().max() <= 1


@pytest.mark.parametrize(("text", "label"), [("dog", 1), ("2", 2), ("7", 3)])
def test_a_class_is_chosen_by_name_or_number(
    pools: Pools, run_dir: Path, tmp_path: Path, text: str, label: int
) -> None:
    """A name that is a number is a name first."""
    images_of(pools[1], run_dir, tmp_path, "--num-images", "1", "--class", text)
    (path,) = tmp_path.glob("00000_*.png")
    assert path.name == f"00000_{NAMES[label]}.png"


def test_the_class_decides_the_image(pools: Pools, run_dir: Path, tmp_path: Path) -> None:
    one, other = (
        images_of(pools[1], run_dir, tmp_path, "--num-images", "1", "--class", name) for name in ("cat", "dog")
    )
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("text", "hint"), [("clok", "did you mean clock?"), ("9", "use one of cat, dog"), ("-1", "use one of")]
)
def test_an_unknown_class_proposes_the_nearest(pools: Pools, run_dir: Path, text: str, hint: str) -> None:
    error = sample(pools[1], run_dir, f"--class={text}").error
    assert error.startswith(f"ConfigError: --class {text} is not a class") and hint in error


def test_raw_weights_and_average_make_different_images(pools: Pools, run_dir: Path, tmp_path: Path) -> None:
    tensors = stored(checkpoint(run_dir, 60))
    assert not torch.equal(tensors["ema/head.out.weight"], tensors["model/head.out.weight"])
    arguments = ("--num-images", "1", "--class", "cat")
    default, ema, raw = (
        images_of(pools[1], run_dir, tmp_path, *arguments, *flags)
        for flags in ([], ["--weights", "ema"], ["--weights", "raw"])
    )
    assert torch.equal(default, ema)
    assert (ema - raw).abs().max() > 1e-3


@pytest.mark.parametrize(
    "flags",
    [
        ("--seed", "1"),
        ("--solver", "unipc"),
        ("--steps", "5"),
        ("--timestep-spacing", "karras"),
        ("--flow-shift", "3"),
        ("--guidance", "4"),
        ("--guidance-interval", "0.2", "0.6"),
        ("--guidance-rescale", "0.7"),
        ("--cache-threshold", "0.5"),
        ("--dynamic-steps", "spectrum"),
        ("--eta", "1"),
    ],
    ids=lambda flags: flags[0],
)
def test_every_option_changes_the_image(pools: Pools, run_dir: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    arguments = ("--num-images", "1", "--class", "cat")
    plain = images_of(pools[1], run_dir, tmp_path, *arguments)
    assert (plain - images_of(pools[1], run_dir, tmp_path, *arguments, *flags)).abs().max() > 1e-4


def test_a_run_without_average_asks_for_the_raw_weights(pools: Pools, tmp_path: Path) -> None:
    train_well(pools[1], tiny_config(train__stop_at_step=1, ema__enabled=False), tmp_path)
    report = sample(pools[1], tmp_path, "--num-images", "1")
    assert report.error.startswith("CheckpointError") and "use --weights raw" in report.error
    assert not sample(pools[1], tmp_path, "--num-images", "1", "--weights", "raw").error


def test_b05_guidance_is_refused_where_no_condition_was_ever_dropped(pools: Pools, tmp_path: Path) -> None:
    settings = {"diffusion__condition_dropout": 0.0, "sampling__guidance": 1.0}
    train_well(pools[1], tiny_config(train__stop_at_step=1, **settings), tmp_path)
    report = sample(pools[1], tmp_path, "--num-images", "1", "--guidance", "2")
    assert report.error.startswith("ConfigError: sampling.guidance = 2.0 needs a network that was trained")
    assert not sample(pools[1], tmp_path, "--num-images", "1").error


def test_latents_are_refused_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    """Before any of them is made."""
    (tmp_path / "latents").mkdir()
    latents = torch.randn(20, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    save_file({"latents": latents, "labels": torch.arange(20) % 5}, tmp_path / "latents" / "part.safetensors")
    config = tiny_config(
        model__in_channels=4,
        data__name="latents",
        data__path=str(tmp_path / "latents"),
        data__num_samples=1024,
        train__stop_at_step=1,
    )
    train_well(pools[1], config, tmp_path / "run")
    for pool in (pools[1], pools[2]):
        report = sample(pool, tmp_path / "run", "--num-images", "1")
        assert report.error.startswith("DataError: the network makes latents of 4 channels")
        assert report.images is None


@pytest.mark.parametrize(("flag", "value"), [("--num-images", "0"), ("--batch-size", "-2")])
def test_counts_must_be_positive(pools: Pools, run_dir: Path, flag: str, value: str) -> None:
    assert sample(pools[1], run_dir, flag, value).error.startswith(f"ConfigError: {flag} = {value} is too small")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--solver", "unipic"), "did you mean unipc?"),
        (("--solver", "unipc", "--eta", "0.5"), "sampling.eta = 0.5 has no effect with sampling.solver = unipc"),
        (("--timestep-spacing", "karras", "--flow-shift", "3"), "sampling.flow_shift = 3.0 has no effect with"),
        (("--guidance-interval", "0.6", "0.2"), "sampling.guidance_interval = [0.6, 0.2] is empty"),
        (("--guidance", "1", "--guidance-rescale", "0.5"), "sampling.guidance_rescale = 0.5 has no effect with"),
        (("--steps", "0"), "sampling.steps = 0"),
        (("--dynamic-steps", "seed", "--text-guard", "nowhere:f"), "sampling.text_guard = nowhere:f is not there"),
        (("--text-guard", "strokes"), "sampling.text_guard = strokes has no effect with sampling.dynamic_steps = none"),
    ],
)
def test_settings_that_cannot_be_are_refused(pools: Pools, run_dir: Path, flags: tuple[str, ...], message: str) -> None:
    error = sample(pools[1], run_dir, *flags).error
    assert error.startswith("ConfigError: ") and message in error


def test_too_many_steps_are_refused(pools: Pools, run_dir: Path) -> None:
    report = sample(pools[1], run_dir, "--steps", "1001")
    assert report.error.startswith("ConfigError: sampling.steps = 1001") and "at most 1000" in report.error


def test_a_layout_that_does_not_fit_is_refused(pools: Pools, run_dir: Path) -> None:
    report = sample(pools[1], run_dir, "--tensor-model-parallel-size", "2")
    assert report.error.startswith("ConfigError: world size 1 is not a multiple")
