"""Networks that read texts, or nothing, through the real trainer: steps, previews, resume and samples."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from megadiff.config.load import config_from_dict, config_to_dict
from megadiff.config.presets import preset_values
from megadiff.config.schema import Config
from tests.engine.runs import tiny_config, train_well
from tests.engine.sample_jobs import sample
from tests.launch.running import losses
from tests.pool import WorkerPool

Pools = Mapping[int, WorkerPool]
FOLDED = {
    "parallel.pipeline_model_parallel_size": 2,
    "train.micro_batch_size": 1,
    "train.gradient_accumulation_steps": 4,
}


def config_of(preset: str, **settings: object) -> Config:
    """A run of two steps with a preview at its end."""
    values = {**config_to_dict(tiny_config()), "model": dict(preset_values(preset))}
    settings = {"train.stop_at_step": 2, "monitor.sample_every_steps": 2, **settings}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    return config_from_dict(values)


@pytest.fixture(scope="module")
def text_run(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    train_well(pools[1], config_of("unet-text-tiny-test"), path)
    return path


def test_a_folded_pipeline_trains_on_texts_as_one_process_does(pools: Pools, text_run: Path, tmp_path: Path) -> None:
    train_well(pools[2], config_of("unet-text-tiny-test", **FOLDED), tmp_path)
    assert len(losses(tmp_path)) == 2
    np.testing.assert_allclose(losses(tmp_path), losses(text_run), rtol=1e-5)


def test_a_preview_has_a_row_for_each_of_the_first_texts(text_run: Path) -> None:
    with Image.open(text_run / "samples/step_00000002.png") as picture:
        width, height = picture.size
    assert height > 3 * width  # four texts, one image each


def test_a_run_without_condition_trains_and_shows_previews(pools: Pools, tmp_path: Path) -> None:
    config = config_of("unet-tiny-test", **{"model.condition": "none", "sampling.guidance": 1.0})
    train_well(pools[1], config, tmp_path)
    assert len(losses(tmp_path)) == 2
    assert (tmp_path / "samples/step_00000002.png").is_file()
    report = sample(pools[1], tmp_path, "--num-images", "3", "--output", str(tmp_path / "out"))
    assert not report.error and report.images.shape[0] == 3
    refused = sample(pools[1], tmp_path, "--class", "0")
    assert "--class has no meaning for a network with model.condition = none" in refused.error


def write_texts(path: Path, **changes: torch.Tensor) -> Path:
    generator = torch.Generator().manual_seed(0)
    tokens, pooled = torch.randn(2, 5, 12, generator=generator), torch.randn(2, 6, generator=generator)
    save_file({"tokens": tokens, "pooled": pooled, **changes}, path)
    return path


def test_samples_of_texts_on_one_process_and_on_a_folded_pipeline(pools: Pools, text_run: Path, tmp_path: Path) -> None:
    file = write_texts(tmp_path / "texts.safetensors")
    arguments = ["--condition", str(file), "--num-images", "2", "--guidance", "3"]
    one = sample(pools[1], text_run, *arguments, "--output", str(tmp_path / "one"))
    assert not one.error and one.images.shape[0] == 4
    assert (one.images[0] - one.images[2]).abs().max() > 0, "both texts give the same picture"
    pipeline = ["--pipeline-model-parallel-size", "2", "--output", str(tmp_path / "two")]
    two = sample(pools[2], text_run, *arguments, *pipeline)
    assert not two.error
    torch.testing.assert_close(two.images, one.images, rtol=0, atol=1e-4)
    assert sorted(path.name for path in (tmp_path / "one").iterdir())[:2] == ["00000_text_0.png", "00001_text_0.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "this network reads texts; give --condition FILE.safetensors with tokens (N, 5, 12) and pooled (N, 6)"),
        (["--class", "0"], "--class has no meaning for a network with model.condition = text"),
        (["--condition", "wrong"], "tokens (2, 4, 12)"),
        (["--condition", "missing"], "cannot read"),
    ],
)
def test_bad_texts_are_refused_in_one_line(
    pools: Pools, text_run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    write_texts(tmp_path / "wrong", tokens=torch.zeros(2, 4, 12))
    given = [str(tmp_path / text) if text in ("wrong", "missing") else text for text in arguments]
    error = sample(pools[1], text_run, *given).error
    assert message in error and error.count("\n") == 0
