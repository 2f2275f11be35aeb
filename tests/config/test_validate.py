"""Every rule between settings has a config that breaks it, and the message has the values and the remedy."""

from typing import Any, get_args

import pytest

from megadiff.config.keys import FIELDS
from megadiff.config.load import load_config
from megadiff.config.networks import FIELDS_OF_NETWORK
from megadiff.config.schema import Config, ModelConfig
from megadiff.config.validate import checks_for
from megadiff.errors import ConfigError
from tests.config import broken_diffusion, broken_models, broken_monitor, broken_parallel, broken_run

TABLES = (
    broken_models.BROKEN,
    broken_diffusion.BROKEN,
    broken_run.BROKEN,
    broken_parallel.BROKEN,
    broken_monitor.BROKEN,
)
CASES = [(name, *case) for table in TABLES for name, cases in table.items() for case in cases]


def test_every_check_has_a_case() -> None:
    assert {name for name, *_ in CASES} == {check.__name__ for name in FIELDS_OF_NETWORK for check in checks_for(name)}


@pytest.mark.parametrize(("name", "settings", "parts", "repair"), CASES, ids=[case[0] for case in CASES])
def test_broken_rule_is_reported_and_the_remedy_works(
    name: str, settings: dict[str, Any], parts: tuple[str, ...], repair: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, settings)
    message = str(error.value)
    assert name in [entry.name for entry in error.traceback], message
    assert all(part in message for part in parts), message
    assert "\n" not in message
    load_config(None, settings | repair)


def test_the_settings_of_the_networks_are_those_of_the_schema() -> None:
    """The schema lists the settings of every network first, then those of each."""
    own = [name for names in FIELDS_OF_NETWORK.values() for name in names]
    assert list(ModelConfig.model_fields)[-len(own) :] == own
    assert FIELDS_OF_NETWORK.keys() == set(get_args(ModelConfig.model_fields["name"].annotation))


@pytest.mark.parametrize("key", [f"model.{name}" for names in FIELDS_OF_NETWORK.values() for name in names])
def test_every_setting_of_the_other_network_is_refused(key: str) -> None:
    name = key.removeprefix("model.")
    other = "unet" if name in FIELDS_OF_NETWORK["dit"] else "dit"
    default = getattr(Config().model, name)
    options = get_args(FIELDS[key].annotation)
    value = {bool: not default, tuple: [8], str: options[-1] if options else None}.get(type(default), 8)
    with pytest.raises(ConfigError, match=rf"^model\.{name} = .* has no effect with model\.name = {other};"):
        load_config(None, {"model.name": other, key: value})


def test_b05_guidance_of_one_needs_no_condition_dropout() -> None:
    config = load_config(None, {"diffusion.condition_dropout": 0.0, "sampling.guidance": 1.0})
    assert config.diffusion.condition_dropout == 0
