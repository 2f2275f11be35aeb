"""The analytic operation counts against torch's counter, which watches the operators that really run."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megadiff.config.presets import preset_values
from megadiff.config.schema import ModelConfig
from megadiff.models import build_network
from megadiff.models.flops import layer_flops, training_flops

SIZES = {
    "tiny": ModelConfig(hidden_size=32, num_heads=4, num_layers=2, input_size=8, patch_size=2),
    "patch-1-sigma": ModelConfig(
        hidden_size=48, num_heads=3, num_layers=3, input_size=8, patch_size=1, in_channels=4, learn_sigma=True
    ),
    "wide-mlp": ModelConfig(hidden_size=32, num_heads=2, num_layers=1, input_size=16, mlp_ratio=2.5),
}


def inputs_of(model: ModelConfig, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    images = torch.randn(batch, model.in_channels, model.input_size, model.input_size)
    return images, torch.randint(1000, (batch,)), torch.randint(model.num_classes, (batch,))


@pytest.mark.parametrize("name", SIZES)
def test_forward_operations(name: str) -> None:
    model, batch = SIZES[name], 3
    network = build_network(model, seed=0)
    # The math path is the one whose matrix products the counter sees on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network(inputs_of(model, batch))
    assert counter.get_total_flops() == batch * sum(layer_flops(model).values())


@pytest.mark.parametrize("name", SIZES)
def test_operations_of_each_layer(name: str) -> None:
    model = SIZES[name]
    network = build_network(model, seed=0)
    state = inputs_of(model, 1)
    for layer in network.layer_names:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            state = network.layer(layer)(state)
        assert counter.get_total_flops() == layer_flops(model)[layer], layer


@pytest.mark.parametrize("name", SIZES)
def test_training_operations(name: str) -> None:
    """Backward costs twice the forward pass, but for gradients of inputs that nothing learns from."""
    model = SIZES[name]
    network = build_network(model, seed=0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network(inputs_of(model, 1)).sum().backward()
    tokens = (model.input_size // model.patch_size) ** 2
    of_pixels = 2 * tokens * model.hidden_size * model.patch_size**2 * model.in_channels
    of_sinusoids = 2 * 256 * model.hidden_size
    assert counter.get_total_flops() == training_flops(model) - of_pixels - of_sinusoids


def test_the_published_count_of_dit_xl() -> None:
    """118.64 G multiply-adds for DiT-XL/2 at 256 pixels (Peebles & Xie 2022, table 4)."""
    model = ModelConfig(**preset_values("DiT-XL/2") | {"learn_sigma": True})
    assert sum(layer_flops(model).values()) / 2e9 == pytest.approx(118.64, rel=0.005)
