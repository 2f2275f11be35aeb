"""The shapes read off the meta device against those of a real forward pass."""

import pytest
import torch

from megadiff.config.schema import ModelConfig
from megadiff.models.build import long_skips
from megadiff.models.states import entering_shapes, meta_inputs, skip_shapes
from tests.models.networks import entering_states, preset, random_inputs, random_network

MODELS = {
    "dit": ModelConfig(hidden_size=16, num_heads=2, num_layers=2, input_size=4, learn_sigma=True),
    "udit": preset("udit-tiny"),
    "unet": preset("unet-tiny-test"),
    "unet none gated": preset("unet-tiny-test", condition="none", skip="gated", skip_shift=True, resample="pool"),
    "unet text": preset("unet-text-tiny-test"),
    "unet tiles": preset("unet-text-tiny-test", attention_tile_size=2, pooled_dim=0, pixel_size=0),
}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_equal_those_of_a_real_forward_pass(name: str) -> None:
    model, batch = MODELS[name], 3
    states = entering_states(random_network(model), random_inputs(model, batch))
    shapes, skips = entering_shapes(model), long_skips(model)
    assert list(shapes) == list(states)
    for layer, state in states.items():
        assert all(len(part) == batch for part in state)
        found = [tuple(part.shape[1:]) for part in state]
        taken = [skip_shapes(model)[skips[layer]]] if layer in skips else []
        assert [*shapes[layer], *taken] == found, layer


@pytest.mark.parametrize("name", MODELS)
def test_inputs_have_the_shapes_and_types_of_real_ones(name: str) -> None:
    model = MODELS[name]
    for found, real in zip(meta_inputs(model, 3), random_inputs(model, 3, torch.float32), strict=True):
        assert found.is_meta
        assert (found.shape, found.dtype) == (real.shape, real.dtype)
