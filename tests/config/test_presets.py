"""The presets: valid, complete, of the published sizes, and described by the documentation."""

import re
from pathlib import Path

import pytest

from megadiff.config.load import load_config
from megadiff.config.networks import FIELDS_OF_NETWORK, has_long_skips, num_chain_layers
from megadiff.config.presets import MODEL_PRESETS
from megadiff.config.schema import ModelConfig
from megadiff.models import long_skips, meta_chain

CONFIGURATION = Path(__file__).parents[2] / "docs/configuration.md"
DOCUMENTED = re.compile(r"^\| `([^`]+)`[^|]* \| .* \| ([\d,.]+) M \|$", re.MULTILINE)


def millions(model: ModelConfig) -> float:
    return sum(parameter.numel() for parameter in meta_chain(model).parameters()) / 1e6


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_every_preset_is_valid_and_fills_the_model(name: str) -> None:
    model = load_config(None, {"model.preset": name, "data.name": "ids"}).model
    assert model.preset == name
    assert model.model_copy(update=MODEL_PRESETS[name]) == model


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_preset_fills_only_the_fields_of_its_network(name: str) -> None:
    preset = MODEL_PRESETS[name]
    other = [field for network, fields in FIELDS_OF_NETWORK.items() if network != preset["name"] for field in fields]
    assert not preset.keys() & set(other)


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_number_of_layers_in_closed_form_is_that_of_the_chain(name: str) -> None:
    model = ModelConfig(**MODEL_PRESETS[name])
    assert num_chain_layers(model) == len(meta_chain(model).layer_names)
    assert has_long_skips(model) == bool(long_skips(model))


def test_documented_numbers_of_parameters() -> None:
    documented = dict(DOCUMENTED.findall(CONFIGURATION.read_text()))
    assert MODEL_PRESETS.keys() - documented.keys() == {
        f"DiT-{size}/{patch}" for size in ("S", "B", "L", "XL") for patch in (4, 8)
    }
    counted = {name: f"{millions(ModelConfig(**MODEL_PRESETS[name])):,.1f}" for name in documented}
    assert documented == counted
