"""What may change on resume, what is told and what is refused."""

from typing import Any

import pytest

from megadiff.config.keys import FIELDS
from megadiff.config.load import config_to_dict, load_config
from megadiff.config.resume import check_resume
from megadiff.errors import ConfigError

FIXED = {
    "model.hidden_size": 64,
    "model.qk_norm": True,
    "diffusion.prediction": "eps",
    "diffusion.condition_dropout": 0.2,
    "data.flip": True,
    "data.random_crop": 0.2,
    "data.hsv_jitter": [0.1, 0.2, 0.3],
    "data.classes": ["fruit"],
}
SILENT = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.zero_stage": 1,
    "train.micro_batch_size": 2,
    "train.gradient_accumulation_steps": 4,
    "data.prefetch_batches": 0,
}
TOLD = {
    "optimizer.lr": 2e-4,
    "optimizer.betas": [0.9, 0.99],
    "train.steps": 2000,
    "train.stop_at_step": 50,
    "train.global_batch_size": 128,
    "train.seed": 1,
    "train.precision": "bf16",
    "ema.decay": 0.99,
    "data.path": "/moved",
    "deepspeed.wall_clock_breakdown": True,
}
OLD = config_to_dict(load_config(None))


def test_equal_configs_have_no_differences() -> None:
    assert check_resume(OLD, load_config(None)) == []


@pytest.mark.parametrize(("key", "value"), FIXED.items())
def test_change_of_network_diffusion_or_data_is_an_error_with_both_values(key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError) as error:
        check_resume(OLD, load_config(None, {key: value}))
    assert f"{key} was {OLD[section][name]} and is {value}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("key", "value"), SILENT.items())
def test_layout_may_change(key: str, value: Any) -> None:
    assert check_resume(OLD, load_config(None, {key: value})) == []


@pytest.mark.parametrize(("key", "value"), TOLD.items())
def test_other_change_is_told_with_both_values(key: str, value: Any) -> None:
    (line,) = check_resume(OLD, load_config(None, {key: value}))
    assert line.startswith(f"{key}: ")
    assert line.endswith(f" -> {value}")


def test_preset_name_alone_is_only_told() -> None:
    sizes = {"input_size": 8, "hidden_size": 32, "num_layers": 4}
    old = config_to_dict(load_config(None, {f"model.{name}": size for name, size in sizes.items()}))
    new = load_config(None, {"model.preset": "dit-tiny-test"})
    assert check_resume(old, new) == ["model.preset: None -> dit-tiny-test"]


def test_setting_younger_than_the_checkpoint_counts_as_its_default() -> None:
    old = {**OLD, "model": {k: v for k, v in OLD["model"].items() if k != "qk_norm"}}
    assert check_resume(old, load_config(None)) == []
    with pytest.raises(ConfigError, match=r"model\.qk_norm was False and is True"):
        check_resume(old, load_config(None, {"model.qk_norm": True}))


def test_setting_that_no_longer_exists_is_told() -> None:
    old = {**OLD, "train": {**OLD["train"], "gone": 3}}
    assert check_resume(old, load_config(None)) == ["train.gone: 3 -> not set"]


def test_cases_name_existing_settings() -> None:
    named = {*FIXED, *SILENT, *TOLD} - {"deepspeed.wall_clock_breakdown"}
    assert named <= FIELDS.keys()
