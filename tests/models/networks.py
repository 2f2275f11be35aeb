"""Networks with random values in float64, their inputs, and the states that enter their layers."""

import functools

import torch
from torch import Tensor, nn

from megadiff.config.presets import preset_values
from megadiff.config.schema import ModelConfig
from megadiff.models import build_network
from megadiff.models.chain import Chain, State
from tests.parity.networks import random_conditions, random_value, seeded

Inputs = tuple[Tensor, Tensor, Tensor]


def preset(name: str, **options: object) -> ModelConfig:
    """A preset with some fields replaced."""
    return ModelConfig(**{**preset_values(name), **options})


def random_network(model: ModelConfig, dtype: torch.dtype = torch.float64) -> Chain:
    """The network with values that leave no gradient zero."""
    network = build_network(model, 0, dtype)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(random_value(name, parameter.shape, dtype))
    return network


def random_inputs(model: ModelConfig, batch: int = 2, dtype: torch.dtype = torch.float64) -> Inputs:
    """(x_t, t, labels) with timesteps over the whole range."""
    generator = seeded("inputs")
    x_t = torch.randn(batch, model.in_channels, model.input_size, model.input_size, generator=generator, dtype=dtype)
    labels = random_conditions(model, batch, generator)
    return x_t, torch.linspace(3, 996, batch).long(), labels.to(dtype) if labels.is_floating_point() else labels


def entering_states(network: Chain, inputs: Inputs) -> dict[str, State]:
    """What each layer gets in a real forward pass, long skips included."""
    states: dict[str, State] = {}

    def note(name: str, layer: nn.Module, arguments: tuple[State]) -> None:
        states[name] = arguments[0]

    hooks = [
        network.layer(name).register_forward_pre_hook(functools.partial(note, name)) for name in network.layer_names
    ]
    with torch.no_grad():
        network(inputs)
    for hook in hooks:
        hook.remove()
    return states
