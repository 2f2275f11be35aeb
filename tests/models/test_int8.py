"""Networks with int8 weights: exact arithmetic on rounded weights, bounded rounding, and what stays float."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megadiff.errors import ConfigError
from megadiff.models.chain import Chain
from megadiff.models.int8 import held_bytes, quantize_int8
from megadiff.models.int8_conv import Int8Conv2d
from tests.models.networks import preset, random_inputs, random_network
from tests.parity.networks import seeded

CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": 1},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 5), "padding": (1, 0), "stride": (1, 3)},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 3, "groups": 4},
    {"kernel_size": 3, "groups": 8, "padding": 1, "bias": False},
]
NETWORKS = {
    "dit": preset("dit-tiny-test"),
    "long skips": preset("udit-tiny", qk_norm=True),
    "unet": preset("unet-tiny-test"),
    "unet, text": preset("unet-text-tiny-test", cross_attention_dim=16, pooled_dim=8),
    "unet, gated": preset("unet-tiny-test", skip="gated", skip_shift=True, resnet_time_scale_shift=True),
}
RNG = "int8"


def convolution(**settings: Any) -> nn.Conv2d:
    """8 to 16 channels of very different sizes."""
    conv = nn.Conv2d(8, 16, **settings).requires_grad_(False)
    for parameter in conv.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=seeded(RNG)))
    conv.weight *= torch.logspace(-6, 4, 16).view(-1, 1, 1, 1)
    return conv


def with_weight(conv: nn.Conv2d, weight: Tensor) -> nn.Conv2d:
    conv.weight.copy_(weight)
    return conv


def network(name: str) -> Chain:
    return random_network(NETWORKS[name], torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_a_convolution_is_the_float_one_on_its_rounded_weights(
    settings: dict[str, Any], layout: torch.memory_format
) -> None:
    conv = convolution(**settings)
    ours = Int8Conv2d(conv)
    x = torch.randn(2, 8, 9, 7, generator=seeded(RNG)).contiguous(memory_format=layout)
    expected = with_weight(conv, ours.dequantized())(x)
    found = ours(x)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
def test_a_weight_is_wrong_by_half_a_scale_at_most(settings: dict[str, Any]) -> None:
    conv = convolution(**settings)
    ours = Int8Conv2d(conv)
    largest = conv.weight.abs().amax((1, 2, 3))
    assert torch.allclose(ours.scale, largest / 127) and ours.codes.abs().max() == 127
    errors = (ours.dequantized() - conv.weight).abs().amax((1, 2, 3))
    assert (errors <= ours.scale * (0.5 + 1e-4)).all(), "1e-4 for the rounding of 127 times the scale in float32"
    assert (errors > ours.scale * 0.1).all(), "a channel that nothing was rounded in"


def test_channels_of_zeros_stay_zero() -> None:
    conv = convolution(kernel_size=3)
    conv.weight[::2] = 0.0
    ours = Int8Conv2d(conv)
    found = ours(torch.randn(2, 8, 5, 5, generator=seeded(RNG)))
    bias = conv.bias
    assert bias is not None
    assert (ours.scale > 0).all(), "a scale of 0 would divide by it"
    assert torch.equal(found[:, ::2], bias[::2].view(1, -1, 1, 1).expand(2, 8, 3, 3)) and found.isfinite().all()


def test_weights_that_are_not_numbers_still_show() -> None:
    conv = convolution(kernel_size=1)
    conv.weight[3, 0] = float("nan")
    found = Int8Conv2d(conv)(torch.ones(1, 8, 2, 2))
    assert found[:, 3].isnan().all() and found[:, :3].isfinite().all()


def test_a_convolution_keeps_one_byte_a_weight() -> None:
    ours = Int8Conv2d(convolution(kernel_size=3))
    assert ours.codes.dtype == torch.int8
    assert held_bytes(ours) == 16 * 8 * 9 + 2 * 4 * 16, "weights, scales and biases"
    assert sum(value.numel() * value.element_size() for value in ours.state_dict().values()) == held_bytes(ours)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_but_embeddings_norms_and_the_ends_is_int8(name: str) -> None:
    chain = network(name)
    former = dict(chain.named_modules())
    quantize_int8(chain)
    kept = []
    for path, module in chain.named_modules():
        if isinstance(former[path], nn.Linear) and type(module.weight) is not nn.Parameter:
            assert module.weight.qdata.dtype == torch.int8
        elif isinstance(former[path], nn.Linear | nn.Conv2d) and not isinstance(module, Int8Conv2d):
            kept.append(path)
    ends = ["embed.patch", "head.out"] if NETWORKS[name].name == "dit" else ["embed.conv", "head.conv"]
    assert kept == ends


@pytest.mark.parametrize("name", NETWORKS)
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    """A float weight of O x I becomes O x I bytes and a scale a row; torchao also keeps a zero point a row."""
    chain = network(name)
    before = held_bytes(chain)
    assert before == sum(t.numel() * t.element_size() for t in (*chain.parameters(), *chain.buffers()))
    saved = 0
    for path, module in chain.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and path not in (
            "embed.patch",
            "embed.conv",
            "head.out",
            "head.conv",
        ):
            row = 5 if isinstance(module, nn.Linear) else 4
            saved += 3 * module.weight.numel() - row * len(module.weight)
    quantize_int8(chain)
    assert held_bytes(chain) == before - saved


def test_linear_layers_are_wrong_by_about_one_percent() -> None:
    layer = network("dit").get_submodule("blocks.1.mlp")
    x = torch.randn(4, 64, 32, generator=seeded(RNG))
    expected = layer(x)
    chain = network("dit")
    quantize_int8(chain)
    found = chain.get_submodule("blocks.1.mlp")(x)
    error = float((found - expected).norm() / expected.norm())
    assert 0.003 < error < 0.02, error


def test_integer_products_do_not_overflow() -> None:
    """Where all numbers are the largest: a CPU without VNNI is to use fewer bits, not to clip the sums."""
    chain = network("dit")
    layer = chain.get_submodule("blocks.0.mlp.fc1")
    assert isinstance(layer, nn.Linear)
    layer.weight.fill_(3.0)
    layer.bias.zero_()
    quantize_int8(chain)
    found = layer(torch.full((2, 5, 32), 0.25))
    assert torch.allclose(found, torch.full_like(found, 24.0), rtol=0.02), "half a step of 63"


def test_a_cpu_without_vnni_uses_seven_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchao.utils.should_reduce_range", lambda device: True)
    chain = network("dit")
    assert quantize_int8(chain)
    weight = chain.get_submodule("blocks.0.mlp.fc1").weight
    codes = weight.qdata
    assert -64 <= codes.min() < -40 and 40 < codes.max() <= 63
    monkeypatch.setattr("torchao.utils.should_reduce_range", lambda device: False)
    assert not quantize_int8(network("dit"))


def test_features_that_cuda_cannot_multiply_stay_float() -> None:
    model = preset("unet-text-tiny-test")  # texts of 12 numbers
    chain = random_network(model, torch.float32).eval().requires_grad_(False)
    quantize_int8(chain)
    attention = chain.get_submodule("down.0.0.blocks.0.cross_attn")
    assert type(attention.k.weight) is nn.Parameter and type(attention.q.weight) is not nn.Parameter


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_answers_nearly_as_before(name: str) -> None:
    inputs = random_inputs(NETWORKS[name], 3, torch.float32)
    chain = network(name)
    expected = chain(inputs)
    quantize_int8(chain)
    error = float((chain(inputs) - expected).norm() / expected.norm())
    assert 1e-3 < error < 0.1, error


def test_a_sample_does_not_depend_on_those_beside_it() -> None:
    """Inputs are rounded by token; one scale for a batch would let a large sample coarsen the others."""
    x_t, t, labels = random_inputs(NETWORKS["dit"], 3, torch.float32)
    chain = network("dit")
    quantize_int8(chain)
    expected = chain((x_t, t, labels))[0]
    found = chain((torch.cat([x_t[:1], 1e3 * x_t[1:]]), t, labels))[0]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_missing_torchao_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match=r"^int8 quantization needs torchao \(.*\); pip install 'megadiff\[int8\]'$"):
        quantize_int8(network("dit"))
