"""UNet: every option forward and backward, its start, its published sizes, and the layout of its feature maps."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megadiff.config.schema import ModelConfig
from megadiff.models import build_network, meta_chain
from megadiff.models.layers import sinusoids
from megadiff.models.sizes import output_channels
from megadiff.models.unet import SelfAttention, TextCondition, to_map, to_tokens
from megadiff.ops.backends import Backends
from tests.models.networks import entering_states, preset, random_inputs, random_network

OPTIONS: dict[str, dict[str, object]] = {
    "class": {},
    "none": {"condition": "none"},
    "sigma": {"learn_sigma": True, "time_freq_shift": 1},
    "gated": {"skip": "gated"},
    "shift": {"skip_shift": True},
    "gated and shift": {"skip": "gated", "skip_shift": True},
    "pool": {"resample": "pool"},
    "scale and shift": {"resnet_time_scale_shift": True},
    "tile": {"attention_tile_size": 2, "transformer_layers_per_block": (1, 1)},
    "no attention": {"transformer_layers_per_block": (0, 0), "mid_block_transformer_layers": 0},
    "deep": {"block_out_channels": (16, 32, 32), "transformer_layers_per_block": (0, 1, 0), "layers_per_block": 2},
}
TEXT_OPTIONS: dict[str, dict[str, object]] = {
    "text": {},
    "text without pooled": {"pooled_dim": 0, "pixel_size": 0},
    "text without sizes": {"pixel_size": 0},
    "text with all": {"skip": "gated", "skip_shift": True, "resnet_time_scale_shift": True, "attention_tile_size": 2},
}
MODELS = {name: preset("unet-tiny-test", **options) for name, options in OPTIONS.items()} | {
    name: preset("unet-text-tiny-test", **options) for name, options in TEXT_OPTIONS.items()
}


def is_key_bias(name: str) -> bool:
    """A bias of keys adds the same number to all weights of a query, which softmax takes away again."""
    return name.endswith(".attention.k.bias")


@pytest.mark.parametrize("name", MODELS)
def test_every_option_reaches_every_parameter(name: str) -> None:
    model = MODELS[name]
    network = random_network(model)
    output = network(random_inputs(model))
    assert output.shape == (2, output_channels(model), model.input_size, model.input_size)
    assert output.isfinite().all()
    output.square().mean().backward()
    gradients = {key: parameter.grad for key, parameter in network.named_parameters()}
    assert not [key for key, gradient in gradients.items() if gradient is None or not gradient.isfinite().all()]
    largest = {key: gradient.abs().max().item() for key, gradient in gradients.items()}
    assert not {key: value for key, value in largest.items() if (value > 1e-6) is is_key_bias(key)}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_a_difference_quotient(name: str) -> None:
    """Along one random direction of all parameters and pixels; the error is of second order in the step."""
    model = MODELS[name]
    network = random_network(model)
    x_t, t, labels = random_inputs(model)
    leaves = [x_t.requires_grad_(), *network.parameters()]
    directions = [torch.randn_like(leaf) for leaf in leaves]
    gradients = torch.autograd.grad(network((x_t, t, labels)).sin().sum(), leaves)
    slope = sum((gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True))

    def moved(distance: float) -> Tensor:
        with torch.no_grad():
            torch._foreach_add_(leaves, directions, alpha=distance)
            total = network((x_t, t, labels)).sin().sum()
            torch._foreach_add_(leaves, directions, alpha=-distance)
        return total

    step = 1e-6
    assert (moved(step) - moved(-step)) / (2 * step) == pytest.approx(slope.item(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_new_network_predicts_zero(name: str) -> None:
    model = MODELS[name]
    network = build_network(model, 0, torch.float64)
    assert not network(random_inputs(model)).any()


@pytest.mark.parametrize("name", ["class", "text"])
def test_residual_branches_of_a_new_network_are_zero(name: str) -> None:
    network = build_network(MODELS[name], 0, torch.float64)
    x = torch.randn(2, 32, 4, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    condition, text = torch.randn(2, 64, dtype=torch.float64), torch.randn(2, 5, 12, dtype=torch.float64)
    state: tuple[Tensor, ...] = (x, condition, text) if name == "text" else (x, condition)
    for layer in (layer for layer in network.layer_names if layer.startswith("mid")):
        state = network.layer(layer)(state)
        if layer.endswith((".resnet", ".attn", ".leave")):
            assert torch.equal(state[0], x), layer


@pytest.mark.parametrize("part", ["x_t", "t", "labels"])
@pytest.mark.parametrize("name", ["class", "text", "text without pooled", "none", "gated and shift"])
def test_every_input_changes_its_own_sample_only(name: str, part: str) -> None:
    model = MODELS[name]
    network = random_network(model)
    inputs = dict(zip(("x_t", "t", "labels"), random_inputs(model, batch=3), strict=True))
    before = network(tuple(inputs.values()))
    other = inputs[part].clone()
    other[1] = other[1] + 1 if part != "labels" or model.condition == "text" else (other[1] + 1) % model.num_classes
    after = network(tuple({**inputs, part: other}.values()))
    changes = [not torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(before, after, strict=True)]
    assert changes == [False, part != "labels" or model.condition != "none", False]


@pytest.mark.parametrize("numbers", [slice(0, 12), slice(48, 60), slice(60, 66)], ids=["first", "last", "pooled"])
def test_every_part_of_a_text_counts(numbers: slice) -> None:
    """Five tokens of 12 numbers, then the pooled vector of 6."""
    model = MODELS["text"]
    network = random_network(model)
    x_t, t, labels = random_inputs(model)
    other = labels.clone()
    other[:, numbers] += 1.0
    assert (network((x_t, t, labels)) - network((x_t, t, other))).abs().max() > 1e-3


def test_the_pooled_text_is_joined_with_the_sizes_of_the_picture() -> None:
    """Original size, corner of the crop, target size, each as 256 sinusoids (SDXL, section 2.2)."""
    model = MODELS["text"]
    layer = random_network(model).layer("embed").pooled
    assert isinstance(layer, TextCondition)
    pooled = torch.randn(3, 6, dtype=torch.float64)
    features = [sinusoids(torch.tensor(size), 256, 0, torch.float64) for size in (64, 64, 0, 0, 64, 64)]
    rows = torch.stack([torch.cat([row, *features]) for row in pooled])
    expected = torch.nn.functional.silu(rows @ layer.fc1.weight.T + layer.fc1.bias) @ layer.fc2.weight.T
    torch.testing.assert_close(layer(pooled), expected + layer.fc2.bias)


@pytest.mark.parametrize("kind", ["conv", "pool"])
def test_resampling_halves_and_doubles(kind: str) -> None:
    model = preset("unet-tiny-test", resample=kind)
    network = random_network(model)
    x = torch.randn(1, 16, 8, 8, dtype=torch.float64)
    small, _ = network.layer("down.0.sample")((x, x))
    wide = torch.randn(1, 32, 4, 4, dtype=torch.float64)
    large, _ = network.layer("up.1.sample")((wide, x))
    down, up = (network.layer(name).conv for name in ("down.0.sample", "up.1.sample"))
    if kind == "pool":
        torch.testing.assert_close(small, x.unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean((3, 5)))
        assert torch.equal(large, wide.repeat_interleave(2, 2).repeat_interleave(2, 3))
    else:
        every = torch.nn.functional.conv2d(x, down.weight, down.bias, padding=1)
        torch.testing.assert_close(small, every[:, :, ::2, ::2])
        torch.testing.assert_close(large, up(wide.repeat_interleave(2, 2).repeat_interleave(2, 3)))


def test_attention_of_a_map_equals_attention_written_out() -> None:
    layer = random_network(MODELS["class"]).layer("mid.0.0.attn")
    assert isinstance(layer, SelfAttention)
    x = torch.randn(1, 32, 4, 4, dtype=torch.float64)
    tokens = to_tokens(layer.norm(x))[0]
    heads = []
    for head in range(4):  # of 8 channels
        rows = slice(8 * head, 8 * head + 8)
        q, k, v = (
            tokens @ p.weight[rows].T + p.bias[rows] for p in (layer.attention.q, layer.attention.k, layer.attention.v)
        )
        heads.append(torch.softmax(q @ k.T / 8**0.5, dim=1) @ v)
    out = torch.cat(heads, dim=1) @ layer.attention.out.weight.T + layer.attention.out.bias
    torch.testing.assert_close(layer((x, x))[0], x + out.T.reshape(1, 32, 4, 4))


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("unet-cifar", {"condition": "none"}, 35_746_307),  # google/ddpm-cifar10-32; 35.7 M in DDPM, appendix B
        ("sd2", {}, 865_910_724),  # stabilityai/stable-diffusion-2-1
        ("sdxl", {}, 2_567_463_684),  # stabilityai/stable-diffusion-xl-base-1.0; 2.6 B in SDXL, table 1
    ],
)
def test_published_numbers_of_parameters(name: str, options: dict[str, object], count: int) -> None:
    assert sum(parameter.numel() for parameter in meta_chain(preset(name, **options)).parameters()) == count


def test_tokens_and_maps_are_views_of_each_other() -> None:
    x = torch.randn(2, 6, 3, 3).contiguous(memory_format=torch.channels_last)
    tokens = to_tokens(x)
    assert torch.equal(tokens[1, 5], x[1, :, 1, 2])
    assert torch.equal(to_map(tokens, x.shape), x)
    assert tokens.data_ptr() == to_map(tokens, x.shape).data_ptr() == x.data_ptr()


class LayoutChanges(TorchDispatchMode):
    """Notes the copies of feature maps that differ in layout from their origin, and maps that are not channels-last."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        sides = {model.input_size >> level for level in range(len(model.block_out_channels))}
        self.sides = {(side, side) for side in sides}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[misc]
        result = func(*args, **(kwargs or {}))
        if re.match(r"aten\.(clone|_to_copy|contiguous|copy_)\b", str(func)):
            given = args[1] if "copy_" in str(func) and len(args) > 1 else args[0]
            if given.dim() == 4 and tuple(given.shape[2:]) in self.sides and given.stride() != result.stride():
                self.found.append(f"{func} {tuple(given.shape)} {given.stride()} -> {result.stride()}")
        return result


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("name", MODELS)
def test_feature_maps_stay_channels_last(name: str, kernels: str) -> None:
    """Forward and backward: only the embedding changes the layout, once, and the head, once."""
    model = MODELS[name]
    network = build_network(model, 0, torch.float32, Backends(kernels=kernels))
    inputs = random_inputs(model, dtype=torch.float32)
    for layer, state in entering_states(network, inputs).items():
        for map_ in (part for part in state if part.dim() == 4 and layer != "embed"):
            assert map_.is_contiguous(memory_format=torch.channels_last), layer
    with LayoutChanges(model) as changes:
        output = network(inputs)
        output.square().mean().backward()
    assert output.is_contiguous()
    assert len(changes.found) == 2, changes.found
