"""The stages of progressive training in closed form, and what is wrong with a list of them, in one line."""

from typing import Any

import pytest

from megadiff.config.load import config_from_dict, config_to_dict, load_config
from megadiff.config.progressive import stage_after, training_stages
from megadiff.errors import ConfigError


def load(**train: Any) -> Any:
    values = {"model.input_size": 32, "train.steps": 100, "optimizer.warmup_steps": 0, "optimizer.lr": 1e-3}
    return load_config(None, {**values, **{f"train.{key}": value for key, value in train.items()}})


def test_c9_the_default_stages_are_a_quarter_a_half_and_all() -> None:
    stages = training_stages(load(progressive=True))
    assert [(stage.first_step, stage.end_step) for stage in stages] == [(0, 50), (50, 80), (80, 100)]
    assert [stage.config.model.input_size for stage in stages] == [8, 16, 32]
    assert [stage.config.model.position_size for stage in stages] == [32, 32, 0]


def test_a_run_without_stages_is_one_stage_of_itself() -> None:
    config = load()
    (only,) = training_stages(config)
    assert only.config == config and (only.first_step, only.end_step) == (0, 100)


def test_a_stage_changes_what_it_says_and_nothing_else() -> None:
    stage = {"until": 0.3, "input_size": 16, "global_batch_size": 256, "shift": 2.0, "lr_ratio": 0.5}
    config = load(progressive=True, stages=[stage, {"until": 1.0, "input_size": 32}])
    first, last = (config_to_dict(stage.config) for stage in training_stages(config))
    whole = config_to_dict(config)
    assert (first["train"]["global_batch_size"], first["diffusion"]["shift"], first["optimizer"]["lr"]) == (
        256,
        2.0,
        5e-4,
    )
    whole["train"] |= {"progressive": False, "stages": []}
    assert last == whole


def test_a_shift_by_tokens_follows_the_size_of_the_stage() -> None:
    config = load_config(None, {"model.input_size": 32, "train.progressive": True, "diffusion.shift_base_tokens": 64})
    from megadiff.config.networks import schedule_shift

    assert [schedule_shift(stage.config) for stage in training_stages(config)] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(("steps", "size"), [(0, 8), (1, 8), (50, 8), (51, 16), (80, 16), (100, 32), (999, 32)])
def test_weights_belong_to_the_stage_of_their_last_step(steps: int, size: int) -> None:
    assert stage_after(load(progressive=True), steps).config.model.input_size == size


def test_stages_survive_yaml_and_dictionaries() -> None:
    config = load(progressive=True, stages=[{"until": 1.0, "input_size": 16}])
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("stages", "parts"),
    [
        ([{"untill": 1.0, "input_size": 8}], ("unknown key train.stages[0].untill", "until")),
        ([{"until": 1.0}], ("train.stages in --train.stages lacks a key", "[0].input_size")),
        ([{"until": 1.5, "input_size": 8}], ("train.stages[0].until = 1.5", "less than or equal to 1")),
        ([{"until": 1.0, "input_size": 9}], ("train.stages[0]: ", "patch_size = 2", "input_size = 9")),
        (
            [{"until": 0.5, "input_size": 8, "global_batch_size": 0}, {"until": 1.0, "input_size": 8}],
            ("train.stages[0].global_batch_size = 0",),
        ),
        ([{"until": 1.0, "input_size": 80}], ("train.stages[0]: ", "= 80", "72")),
    ],
)
def test_a_wrong_stage_is_named_in_one_line(stages: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        load(progressive=True, stages=stages)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert "\n" not in str(error.value)


def test_a_size_without_a_quarter_needs_stages() -> None:
    with pytest.raises(ConfigError, match=r"input_size = 18.*train\.stages"):
        load_config(None, {"model.input_size": 18, "train.progressive": True})


def test_levels_of_a_unet_must_divide_every_stage() -> None:
    settings = {"model.preset": "unet-tiny-test", "train.progressive": True}
    with pytest.raises(ConfigError, match=r"train\.stages\[0\]: model\.input_size = 3 "):
        load_config(None, {**settings, "train.stages": [{"until": 1.0, "input_size": 3}]})
