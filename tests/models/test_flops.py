"""The analytic operation counts against torch's counter, which watches the operators that really run."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megadiff.config.presets import preset_values
from megadiff.config.schema import ModelConfig
from megadiff.models import build_network
from megadiff.models.flops import layer_flops, training_flops
from megadiff.models.unet_table import UNetLayer, time_channels, unet_table
from tests.models.networks import entering_states, preset, random_inputs, random_network

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


def scaled(name: str, divisor: int, input_size: int, **options: object) -> ModelConfig:
    """A preset with its widths divided, on smaller pictures."""
    model = preset(name)
    widths = tuple(width // divisor for width in model.block_out_channels)
    sizes = {"attention_head_dim": widths[0], "norm_num_groups": 4, "cross_attention_dim": 24, "text_length": 7}
    return preset(name, block_out_channels=widths, input_size=input_size, **{**sizes, **options})


UNETS = {
    "tiny": preset("unet-tiny-test"),
    "tiny text": preset("unet-text-tiny-test"),
    "small": preset("unet-small-cpu", learn_sigma=True, condition="none"),
    "cifar": scaled("unet-cifar", 16, 16),
    "256": scaled("unet-256", 32, 32),
    "sd2": scaled("sd2", 40, 16),
    "sdxl": scaled("sdxl", 40, 8, pooled_dim=20),
    "gated": preset("unet-tiny-test", skip="gated", skip_shift=True, resample="pool"),
    "shift, concat": preset("unet-tiny-test", skip_shift=True, resnet_time_scale_shift=True),
    "tiles": preset("unet-text-tiny-test", attention_tile_size=2, pixel_size=0),
    "udit": preset("udit-tiny"),
    "udit tiles": preset("udit-tiny", attention_tile_size=2),
}


@pytest.mark.parametrize("name", UNETS)
def test_operations_of_each_layer_with_skips(name: str) -> None:
    model, batch = UNETS[name], 2
    network, expected = random_network(model, torch.float32), layer_flops(model)
    states = entering_states(network, random_inputs(model, batch, torch.float32))
    assert list(expected) == list(states)
    for layer, state in states.items():
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            network.layer(layer)(state)
        assert counter.get_total_flops() == batch * expected[layer], layer


@pytest.mark.parametrize("name", [name for name in UNETS if not name.startswith("udit")])
def test_training_operations_of_a_unet(name: str) -> None:
    """Backward costs twice the forward pass, but for gradients of pixels, sinusoids and texts."""
    model = UNETS[name]
    network = random_network(model, torch.float32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network(random_inputs(model, 1, torch.float32)).square().sum().backward()
    without = sum(_unlearnt(model, layer) for layer in unet_table(model))
    assert counter.get_total_flops() == training_flops(model) - without


def _unlearnt(model: ModelConfig, layer: UNetLayer) -> int:
    """Operations of the gradients of what a layer reads from the batch."""
    width, time = layer.out_channels, time_channels(model)
    if layer.kind == "embed":
        pooled = model.pooled_dim + (6 * 256 if model.pixel_size else 0) if model.condition == "text" else 0
        has_pooled = model.pooled_dim > 0
        return 2 * (9 * layer.side**2 * layer.in_channels * width + width * time + has_pooled * pooled * time)
    return 2 * 2 * model.text_length * model.cross_attention_dim * width if layer.kind == "block" else 0
