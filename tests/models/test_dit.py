"""DiT: what adaLN-zero starts from, its position table, its size, and what each part of the condition does."""

import math

import pytest
import torch

from megadiff.config.schema import ModelConfig
from megadiff.models import build_network
from megadiff.models.dit import sincos_positions
from megadiff.models.layers import sinusoids
from megadiff.models.sizes import output_channels

MODEL = ModelConfig(hidden_size=32, num_heads=4, num_layers=3, input_size=8, num_classes=5)


def num_parameters(model: ModelConfig) -> int:
    """The closed form for the number of parameters."""
    width, patch, hidden = model.hidden_size, model.patch_size, int(model.hidden_size * model.mlp_ratio)
    embed = model.in_channels * patch**2 * width + width  # patches
    embed += 256 * width + width + width**2 + width + (model.num_classes + 1) * width  # time and labels
    block = 6 * (width**2 + width) + 4 * (width**2 + width) + 2 * width * hidden + hidden + width
    block += 2 * width // model.num_heads if model.qk_norm else 0
    values = patch**2 * output_channels(model)
    return embed + model.num_layers * block + 2 * (width**2 + width) + width * values + values


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("learn_sigma", [False, True])
def test_the_number_of_parameters_equals_the_closed_form(qk_norm: bool, learn_sigma: bool) -> None:
    model = MODEL.model_copy(update={"qk_norm": qk_norm, "learn_sigma": learn_sigma, "patch_size": 4})
    assert sum(p.numel() for p in build_network(model, 0).parameters()) == num_parameters(model)


@pytest.mark.parametrize(("learn_sigma", "channels"), [(False, 3), (True, 6)])
def test_a_new_network_predicts_zero(learn_sigma: bool, channels: int) -> None:
    network = build_network(MODEL.model_copy(update={"learn_sigma": learn_sigma}), 0)
    output = network((torch.randn(2, 3, 8, 8), torch.tensor([0, 999]), torch.tensor([1, 5])))
    assert output.shape == (2, channels, 8, 8)
    assert not output.any()


def test_blocks_of_a_new_network_are_the_identity() -> None:
    network = build_network(MODEL, 0)
    tokens, condition = network.layer("embed")((torch.randn(2, 3, 8, 8), torch.tensor([0, 999]), torch.tensor([1, 5])))
    state = (tokens, condition)
    for index in range(MODEL.num_layers):
        state = network.layer(f"blocks.{index}")(state)
    assert torch.equal(state[0], tokens)


def test_positions_encode_row_and_column() -> None:
    dim, side = 16, 5
    table = sincos_positions(dim, side)
    for row in range(side):
        for column in range(side):
            expected = []
            for position in (column, row):
                angles = [position / 10_000 ** (i / (dim // 4)) for i in range(dim // 4)]
                expected += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
            found = table[row * side + column].tolist()
            assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("freq_shift", [0, 1])
def test_time_features_equal_the_closed_form(freq_shift: int) -> None:
    features = sinusoids(torch.tensor([0, 37, 999]), 16, freq_shift, torch.float64)
    for found, t in zip(features.tolist(), (0, 37, 999), strict=True):
        angles = [t * 10_000 ** (-i / (8 - freq_shift)) for i in range(8)]
        expected = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
        assert found == pytest.approx(expected, abs=1e-9)


def test_time_features_are_exact_in_half_precision_networks() -> None:
    """t = 999 does not exist in bfloat16, so the angles must not be computed in it."""
    exact = sinusoids(torch.tensor([998, 999]), 256, 0, torch.float64)
    half = sinusoids(torch.tensor([998, 999]), 256, 0, torch.bfloat16)
    assert (half.double() - exact).abs().max() < 2**-8


@pytest.mark.parametrize("part", ["x_t", "t", "labels"])
def test_every_input_changes_its_own_sample_only(part: str) -> None:
    network = build_network(MODEL, 0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    inputs = {
        "x_t": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        "t": torch.tensor([1, 500, 999]),
        "labels": torch.tensor([0, 2, 5]),
    }
    before = network(tuple(inputs.values()))
    changed = {name: value.clone() for name, value in inputs.items()}
    changed[part][1] = changed[part][1] + 1
    after = network(tuple(changed.values()))
    different = (before - after).abs().flatten(1).amax(1) > 1e-4
    assert different.tolist() == [False, True, False]


def test_patches_return_to_where_they_came_from() -> None:
    """A head that answers with each token's first features puts patch (i, j) at (i, j), laid out (p, p, C)."""
    network = build_network(MODEL, 0)
    head = network.layer("head")
    with torch.no_grad():
        head.modulation.bias[:32] = torch.arange(32.0)  # the shift: LayerNorm(0) + shift
        head.out.weight.copy_(torch.eye(12, 32))
    tokens = torch.zeros(1, 16, 32)
    output = head((tokens, torch.zeros(1, 32)))
    patch = output[0, :, :2, :2].permute(1, 2, 0).flatten()
    assert torch.equal(patch, torch.arange(12.0))
    assert torch.equal(output, output[:, :, :2, :2].repeat(1, 1, 4, 4))


def test_blocks_get_contiguous_tokens() -> None:
    """For transposed ones a compiled block gives gradients that are 4 % off (torch 2.13 on the CPU)."""
    network = build_network(MODEL, 0)
    state = network.layer("embed")((torch.randn(2, 3, 8, 8), torch.tensor([0, 999]), torch.tensor([1, 5])))
    assert state[0].is_contiguous()
    for index in range(MODEL.num_layers):
        state = network.layer(f"blocks.{index}")(state)
        assert state[0].is_contiguous()
