"""C6: presets of the optimizer by batch, and a warm-up that is given in epochs."""

from pathlib import Path

import pytest

from megadiff.config.load import config_from_dict, config_to_dict, load_config
from megadiff.config.presets import OPTIMIZER_PRESETS
from megadiff.config.warmup import with_warmup_steps
from megadiff.errors import ConfigError


@pytest.mark.parametrize("name", OPTIMIZER_PRESETS)
def test_a_preset_fills_what_is_not_given(name: str) -> None:
    filled = load_config(None, {"optimizer.preset": name}).optimizer
    assert filled.model_copy(update=OPTIMIZER_PRESETS[name]) == filled
    given = load_config(None, {"optimizer.preset": name, "optimizer.lr": 7e-4, "optimizer.warmup_steps": 9}).optimizer
    assert (given.lr, given.warmup_steps, given.warmup_epochs) == (7e-4, 9, 0.0)


def test_an_unknown_preset_is_told() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.preset = 'batch-128' is not known; did you mean batch-"):
        load_config(None, {"optimizer.preset": "batch-128"})


def test_a_preset_on_the_command_line_is_not_undone_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {lr: 2.0e-3}\n")
    with pytest.raises(ConfigError, match=r"optimizer\.lr = 0\.002 .* would undo --optimizer\.preset batch-256"):
        load_config(file, {"optimizer.preset": "batch-256"})
    assert load_config(file, {"optimizer.preset": "batch-256", "optimizer.lr": 1e-3}).optimizer.warmup_epochs == 5.0


def test_epochs_become_steps_with_the_data() -> None:
    settings = {"optimizer.preset": "batch-256", "train.global_batch_size": 256, "train.steps": 5000}
    config = load_config(None, settings)
    found = with_warmup_steps(config, 50_000)
    assert (found.optimizer.warmup_steps, found.optimizer.warmup_epochs) == (round(5 * 50_000 / 256), 0.0)
    assert with_warmup_steps(found, 10) == found
    assert config_from_dict(config_to_dict(config)) == config and config_from_dict(config_to_dict(found)) == found
    with pytest.raises(
        ConfigError, match=r"warmup_epochs = 5\.0 of 256000 samples are 5000 steps, .* train\.steps = 5000"
    ):
        with_warmup_steps(config, 256_000)
