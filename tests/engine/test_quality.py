"""Quality figures during training: right, the same on every layout, without a trace in the run, and resumed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megadiff.config.load import config_from_dict, config_to_dict
from megadiff.config.schema import Config
from megadiff.data import Dataset
from megadiff.data.balanced import BalancedDataset
from megadiff.data.dataset import InMemoryDataset
from megadiff.data.ids import IdDataset
from megadiff.data.sources import open_dataset
from megadiff.engine.inference import Network
from megadiff.engine.quality import picture_conditions
from megadiff.errors import DataError
from megadiff.evaluation import embedded
from megadiff.evaluation.extract import compute
from megadiff.evaluation.images import batches, choose_rows, open_training
from megadiff.evaluation.quality import judge
from megadiff.evaluation.spaces import open_space
from megadiff.sampling.generate import ImageRequest
from megadiff.sampling.images import to_uint8
from tests.engine.runs import (
    RUN_SECONDS,
    assert_same_tensors,
    checkpoint,
    log_lines,
    run,
    tiny_config,
    train_run,
    train_well,
)
from tests.evaluation.sets import save_vision
from tests.parity.jobs import this_process
from tests.pool import WorkerPool

Pools = Mapping[int, WorkerPool]
NUM_IMAGES = 9  # which two data ranks cannot share evenly
FIGURES = ("frechet", "kernel", "precision", "recall", "density", "coverage")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision(tmp_path_factory.mktemp("vision") / "dinov2")


def judged_config(features: Path | str, **changes: Any) -> Config:
    """A tiny run with figures at every second step."""
    settings = {"every_steps": 2, "images": NUM_IMAGES, "features": str(features)}
    own = {f"monitor__evaluate_{name}": value for name, value in settings.items()}
    return tiny_config(**{"train__steps": 4, "optimizer__warmup_steps": 0, **own, **changes})


def quality_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "quality.jsonl").read_text().splitlines()]


def test_the_figures_are_those_of_the_saved_average_and_of_the_runs_pictures(
    pools: Pools, tmp_path: Path, vision: Path
) -> None:
    """The other way to them: load the checkpoint, sample it, and compare by hand."""
    config = judged_config(vision)
    train_well(pools[1], config, tmp_path)
    dataset = open_dataset(config)
    rows = choose_rows(len(dataset), NUM_IMAGES, "")
    (fake,) = pools[1].run(sample_average, config=config, folder=checkpoint(tmp_path, 4), rows=rows)
    space = open_space(str(vision), None, tmp_path)
    real = batches(open_training("", dataset, NUM_IMAGES), NUM_IMAGES, 1)
    features = [compute(parts, space, CPU).values for parts in (real, [to_uint8(fake)])]
    expected = judge(*features)
    at_2, at_4 = quality_lines(tmp_path)
    assert (at_2["step"], at_4["step"]) == (2, 4) and at_2["frechet"] != at_4["frechet"]
    assert [at_4[name] for name in FIGURES] == pytest.approx([getattr(expected, name) for name in FIGURES], rel=1e-6)
    assert at_4["num_images"] == NUM_IMAGES and at_4["size"] == 4
    assert at_4["features"] == space.name and at_4["fingerprint"] == space.fingerprint


def sample_average(config: Config, folder: Path, rows: list[int]) -> Tensor:
    """The job for the pool: pictures of a checkpoint, of the classes of some rows of the data."""
    network = Network(config, folder, "ema", this_process())
    labels = open_dataset(config).labels
    return network.generate(ImageRequest([labels[row] for row in rows], range(len(rows)), config.train.seed))


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"parallel__tensor_model_parallel_size": 2},
    "pp2": {"parallel__pipeline_model_parallel_size": 2},
    "zero3": {"parallel__zero_stage": 3},
}


# In float64, which ZeRO 3 lacks, no picture differs by a level of its 8 bits; what is left is the order of additions in
# the features, whose float32 loses digits in differences. In float32 a few of the 432 values may differ by a level; one
# that did changed the distances by 1.4e-3 at most.
LIMITS = {"fp64": 1e-4, "fp32": 1e-2}


@pytest.fixture(scope="module")
def of_one_process(
    pools: Pools, tmp_path_factory: pytest.TempPathFactory, vision: Path
) -> dict[str, list[dict[str, Any]]]:
    """The lines of one process by precision."""
    found = {}
    for precision in LIMITS:
        path = tmp_path_factory.mktemp("one")
        train_well(pools[1], judged_config(vision, train__precision=precision), path)
        found[precision] = quality_lines(path)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_finds_the_same(
    pools: Pools, tmp_path: Path, vision: Path, of_one_process: dict[str, list[dict[str, Any]]], name: str
) -> None:
    precision = "fp32" if name == "zero3" else "fp64"
    train_well(pools[2], judged_config(vision, train__precision=precision, **LAYOUTS[name]), tmp_path)
    found, expected = quality_lines(tmp_path), of_one_process[precision]
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        figures = [theirs[key] for key in FIGURES]
        assert [ours[key] for key in FIGURES] == pytest.approx(figures, rel=LIMITS[precision])
        assert {**ours, **dict.fromkeys(FIGURES)} == {**theirs, **dict.fromkeys(FIGURES)}


def train_and_draw(config: Config, run_dir: Path) -> tuple[str, Tensor]:
    """The job for the pool: trains with a classifier of few steps; the error, and the next random numbers."""
    torch.manual_seed(5)
    with mock.patch.object(embedded, "STEPS", 3):
        report = train_run(config, run_dir)
    return report.error, torch.rand(3)


@pytest.mark.parametrize(("name", "features"), [("1 process", "embedded"), ("zero3", "vision"), ("pp2", "vision")])
def test_training_is_bit_for_bit_the_same_with_and_without(
    pools: Pools, tmp_path: Path, vision: Path, name: str, features: str
) -> None:
    layout = LAYOUTS.get(name, {})
    off = tiny_config(train__steps=4, optimizer__warmup_steps=0, **layout)
    on = judged_config(vision if features == "vision" else features, monitor__evaluate_every_steps=1, **layout)
    drawn = {}
    for kind, config in (("off", off), ("on", on)):
        reports = pools[2 if layout else 1].run(train_and_draw, RUN_SECONDS, config=config, run_dir=tmp_path / kind)
        assert not any(error for error, _ in reports), reports
        drawn[kind] = torch.stack([numbers for _, numbers in reports])
    assert torch.equal(drawn["on"], drawn["off"]), "random numbers were used up"
    assert_same_tensors(checkpoint(tmp_path / "on", 4), checkpoint(tmp_path / "off", 4))
    losses = [[line["loss"] for line in log_lines(tmp_path / kind)] for kind in ("on", "off")]
    assert losses[0] == losses[1] and len(quality_lines(tmp_path / "on")) == 4
    assert not (tmp_path / "off" / "quality.jsonl").exists() and not (tmp_path / "off" / ".features").exists()


def test_the_embedded_space_is_kept_in_the_run_folder(pools: Pools, tmp_path: Path) -> None:
    config = judged_config("embedded")
    ((error, _),) = pools[1].run(train_and_draw, RUN_SECONDS, config=config, run_dir=tmp_path)
    assert not error
    names = {path.name for path in (tmp_path / ".features").iterdir()}
    assert len(names) == 2 and "emoji_classifier_32_3.safetensors" in names, "the network, and the real features"
    assert {line["features"] for line in quality_lines(tmp_path)} == {"embedded emoji classifier"}


def test_a_run_that_goes_on_repeats_and_loses_no_line(pools: Pools, tmp_path: Path, vision: Path) -> None:
    """It dies after step 7, of which 4 is saved; the features of real pictures are read the second time."""
    config = judged_config(vision, train__steps=10, checkpoint__save_every_steps=4)
    train_well(pools[1], config, tmp_path / "straight")
    crashed = run(pools[1], config, tmp_path / "parts", crash_after=7)
    assert crashed.error.startswith("KeyboardInterrupt")
    assert [line["step"] for line in quality_lines(tmp_path / "parts")] == [2, 4, 6]
    (kept,) = (tmp_path / "parts" / ".features").iterdir()
    written = kept.stat().st_mtime_ns
    train_well(pools[1], config, tmp_path / "parts")
    assert (tmp_path / "parts" / "quality.jsonl").read_text() == (tmp_path / "straight" / "quality.jsonl").read_text()
    assert [line["step"] for line in quality_lines(tmp_path / "parts")] == [2, 4, 6, 8, 10]
    assert kept.stat().st_mtime_ns == written


def test_the_last_step_is_judged_too(pools: Pools, tmp_path: Path, vision: Path) -> None:
    report = train_well(pools[1], judged_config(vision, train__stop_at_step=3), tmp_path)
    assert [line["step"] for line in quality_lines(tmp_path)] == [2, 3]
    assert report.output.count("quality at step") == 2


def test_grey_pictures_of_a_progressive_run_are_judged_at_the_size_of_their_stage(
    pools: Pools, tmp_path: Path, vision: Path
) -> None:
    grey = {"model__in_channels": 1, "train__progressive": True, "model__input_size": 8}
    train_well(pools[1], judged_config(vision, train__steps=10, monitor__evaluate_every_steps=100, **grey), tmp_path)
    assert [(line["step"], line["size"]) for line in quality_lines(tmp_path)] == [(5, 2), (8, 4), (10, 8)]


def test_conditions_are_those_of_the_real_pictures() -> None:
    rows = [7, 3, 5]
    by_class, by_text = (IdDataset(20, 5, 3, 4, text_size) for text_size in (0, 6))
    assert picture_conditions(conditioned("class"), by_class, rows) == [2, 3, 0]
    texts = picture_conditions(conditioned("text"), by_text, rows)
    assert torch.equal(torch.stack(list(texts)), torch.stack([by_text.load(row)[1] for row in rows]))
    assert picture_conditions(conditioned("none"), by_class, rows) == [0, 0, 0]


def conditioned(kind: str) -> Config:
    values = config_to_dict(tiny_config())
    values["model"] = {"preset": "unet-tiny-test", "condition": kind} if kind == "none" else values["model"]
    values["sampling"]["guidance"] = 1.0
    config = config_from_dict(values)
    return config.model_copy(update={"model": config.model.model_copy(update={"condition": kind})})


@pytest.fixture
def unbalanced() -> Dataset:
    pixels = torch.arange(0, 240, 30, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)
    return InMemoryDataset(pixels, (0, 0, 0, 0, 0, 0, 1, 2), ("a", "b", "c"), "f")


def test_a_balanced_run_is_judged_by_pictures_that_count_once(
    pools: Pools, tmp_path: Path, vision: Path, unbalanced: Dataset
) -> None:
    """Eighteen entries of eight pictures: nine are too many."""
    settings = {"model__num_classes": 3, "train__steps": 2}
    config = judged_config(vision, **settings)
    (error,) = pools[1].run(train_on, RUN_SECONDS, config=config, run_dir=tmp_path / "9", dataset=unbalanced)
    assert "monitor.evaluate_images = 9 exceeds the 8 pictures" in error
    config = judged_config(vision, **settings, monitor__evaluate_images=8)
    assert pools[1].run(train_on, RUN_SECONDS, config=config, run_dir=tmp_path / "8", dataset=unbalanced) == [""]
    (kept,) = (tmp_path / "8" / ".features").iterdir()
    assert len(load_file(kept)["values"].unique(dim=0)) == 8


def train_on(config: Config, run_dir: Path, dataset: Dataset) -> str:
    """The job for the pool: trains on a balanced view of a data set; the error."""
    with mock.patch("megadiff.engine.trainer.open_dataset", lambda config: BalancedDataset(dataset)):
        return train_run(config, run_dir).error


@pytest.mark.parametrize(
    ("features", "images", "message"),
    [
        ("embedded", 38, "DataError: monitor.evaluate_images = 38 exceeds the 37 pictures of data.name = ids; use at"),
        ("resnet", 9, "ConfigError: monitor.evaluate_features = resnet is no feature space; use embedded, inception"),
        ("embedded", 9, "DataError: monitor.evaluate_features = embedded learns from the pictures of the extra demo"),
    ],
)
def test_what_cannot_be_judged_is_refused_on_all_ranks_before_a_step(
    pools: Pools, tmp_path: Path, features: str, images: int, message: str
) -> None:
    config = judged_config(features, monitor__evaluate_images=images)
    first, second = pools[2].run(train_without_pictures, RUN_SECONDS, config=config, run_dir=tmp_path)
    assert first == second and first.startswith(message) and "\n" not in first
    assert not (tmp_path / "log.jsonl").exists() and not (tmp_path / "checkpoints").exists()


def train_without_pictures(config: Config, run_dir: Path) -> str:
    """The job for the pool: trains where the embedded pictures are not installed; the error."""
    with mock.patch.object(embedded, "open_emoji", side_effect=DataError("no package")):
        return train_run(config, run_dir).error


def test_weights_of_another_network_are_refused_by_the_name_of_the_setting(pools: Pools, tmp_path: Path) -> None:
    config = judged_config("inception", monitor__evaluate_weights=str(tmp_path / "absent.pth"))
    report = run(pools[1], config, tmp_path / "run")
    assert report.error.startswith("CheckpointError: monitor.evaluate_weights = ") and "is not a file" in report.error
