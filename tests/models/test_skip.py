"""Long skips: the table of who takes which, the junctions, and the learnt sub-pixel shift against torch's sampler."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.config.presets import MODEL_PRESETS
from megadiff.models import build_network
from megadiff.models.build import long_skips, meta_chain
from megadiff.models.skip import Junction, SkipShift, shift_dim
from megadiff.models.unet_table import unet_table
from tests.models.networks import preset, random_inputs, random_network

SKIPPING = [name for name, values in MODEL_PRESETS.items() if values["name"] == "unet" or values.get("long_skips")]


@pytest.mark.parametrize("name", SKIPPING)
def test_skips_are_nested(name: str) -> None:
    """What is given last is taken first, as brackets close; every giver stands before its taker, and gives once."""
    model = preset(name)
    skips = long_skips(model)
    givers, open_ones = set(skips.values()), []
    assert len(givers) == len(skips)
    for layer in meta_chain(model).layer_names:
        if layer in skips:
            assert open_ones.pop() == skips[layer]
        if layer in givers:
            open_ones.append(layer)
    assert not open_ones


@pytest.mark.parametrize("name", [name for name in SKIPPING if preset(name).name == "unet"])
def test_skips_of_a_unet_have_the_width_and_size_of_their_giver(name: str) -> None:
    model = preset(name)
    table = {layer.name: layer for layer in unet_table(model)}
    takers = [layer for layer in table.values() if layer.skip_from]
    assert len(takers) == len(model.block_out_channels) * (model.layers_per_block + 1)
    for layer in takers:
        giver = table[layer.skip_from or ""]
        assert giver.out_channels == layer.skip_channels
        assert (giver.side // 2 if giver.kind == "down" else giver.side) == layer.side


def test_skips_of_a_udit_pair_mirror_images() -> None:
    """Seven blocks: three pairs around the middle one."""
    assert long_skips(preset("udit-tiny")) == {"blocks.4": "blocks.2", "blocks.5": "blocks.1", "blocks.6": "blocks.0"}


@pytest.mark.parametrize("name", ["unet-tiny-test", "unet-text-tiny-test", "udit-tiny"])
def test_every_skip_counts(name: str) -> None:
    """Without the skip's part of the weights that read it, the output differs."""
    model = preset(name)
    network = random_network(model)
    expected = network(random_inputs(model))
    for taker in long_skips(model):
        changed = random_network(model)
        layer = changed.layer(taker)
        weights = [layer.merge.weight] if model.name == "dit" else [layer.conv1.weight, layer.shortcut.weight]
        with torch.no_grad():
            for weight in weights:
                skip_width = weight.shape[0] if model.name == "dit" else _skip_channels(name, taker)
                weight[:, -skip_width:] = 0
        assert (changed(random_inputs(model)) - expected).abs().max() > 1e-6, taker


def _skip_channels(name: str, taker: str) -> int:
    return next(layer.skip_channels for layer in unet_table(preset(name)) if layer.name == taker)


def sampled(x: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """x (B, C, H, W) at positions moved by dx, dy (B, C) pixels, by torch's bilinear sampler, channel by channel."""
    batch, channels, height, width = x.shape
    rows, columns = torch.arange(height, dtype=x.dtype), torch.arange(width, dtype=x.dtype)
    along_x = (columns + dx.flatten()[:, None]) * 2 / (width - 1) - 1  # (B C, W)
    along_y = (rows + dy.flatten()[:, None]) * 2 / (height - 1) - 1  # (B C, H)
    grid = torch.stack([along_x[:, None, :].expand(-1, height, -1), along_y[:, :, None].expand(-1, -1, width)], dim=-1)
    moved = F.grid_sample(x.reshape(-1, 1, height, width), grid, "bilinear", "border", align_corners=True)
    return moved.view(batch, channels, height, width)


def distances(*shape: int) -> Tensor:
    """In [-1, 1], both ends and zero among them."""
    values = torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    values.view(-1)[:3] = torch.tensor([-1.0, 0.0, 1.0])
    return values


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_shifts_equal_bilinear_sampling(layout: torch.memory_format) -> None:
    x = torch.randn(2, 5, 4, 7, dtype=torch.float64).contiguous(memory_format=layout)
    zero = torch.zeros(2, 5, dtype=torch.float64)
    by = distances(2, 5)
    torch.testing.assert_close(shift_dim(x, by, 3), sampled(x, by, zero))
    torch.testing.assert_close(shift_dim(x, by, 2), sampled(x, zero, by))
    torch.testing.assert_close(shift_dim(shift_dim(x, by, 3), by.flip(0), 2), sampled(x, by, by.flip(0)))


def test_a_whole_pixel_moves_the_map() -> None:
    x = torch.arange(12.0).view(1, 1, 3, 4)
    one = torch.ones(1, 1)
    assert shift_dim(x, one, 3)[0, 0, 0].tolist() == [1.0, 2.0, 3.0, 3.0]
    assert shift_dim(x, -one, 3)[0, 0, 0].tolist() == [0.0, 0.0, 1.0, 2.0]
    assert shift_dim(x, one, 2)[0, 0, :, 0].tolist() == [4.0, 8.0, 8.0]


@pytest.mark.parametrize("dim", [2, 3])
def test_the_gradient_of_a_shift(dim: int) -> None:
    """Not at whole pixels, where an interpolation has a kink."""
    x = torch.randn(2, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    by = torch.tensor([[-0.9, -0.5, -0.1], [0.2, 0.6, 0.95]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, by: shift_dim(x, by, dim), (x, by))


def test_a_learnt_shift_equals_bilinear_sampling_at_gated_offsets() -> None:
    shift = SkipShift(6, 10).double()
    with torch.no_grad():
        shift.offsets.copy_(torch.randn(2, 6))
    skip, condition = torch.randn(2, 6, 5, 5, dtype=torch.float64), torch.randn(2, 10, dtype=torch.float64)
    gate = torch.sigmoid(F.silu(condition) @ shift.gate.weight.T + shift.gate.bias)
    dx, dy = gate * torch.tanh(shift.offsets[0]), gate * torch.tanh(shift.offsets[1])
    torch.testing.assert_close(shift(skip, condition), sampled(skip, dx, dy))


def test_new_gates_stand_at_one_half() -> None:
    model = preset("unet-tiny-test", skip="gated")
    network = build_network(model, 0, torch.float64)
    for taker in long_skips(model):
        junction = network.layer(taker).junction
        assert isinstance(junction, Junction)
        x = torch.randn(2, junction.gate.in_channels, 4, 4, dtype=torch.float64)
        skip = torch.randn(2, _skip_channels("unet-tiny-test", taker), 4, 4, dtype=torch.float64)
        torch.testing.assert_close(junction(x, skip, x), (x + junction.project(skip)) / 2)


def test_new_offsets_have_the_strength_of_the_config() -> None:
    network = build_network(preset("unet-tiny-test", skip_shift=True, skip_shift_strength=0.3), 0)
    offsets = torch.cat([value.flatten() for name, value in network.named_parameters() if name.endswith(".offsets")])
    error_of_std = 0.3 / (2 * len(offsets)) ** 0.5
    assert offsets.std().item() == pytest.approx(0.3, abs=4 * error_of_std)


@pytest.mark.parametrize(("taker", "is_projected"), [("up.1.0.resnet", False), ("up.1.1.resnet", True)])
def test_a_gated_junction_written_out(taker: str, is_projected: bool) -> None:
    """A skip of the width of the way up, and one of another width."""
    junction = random_network(preset("unet-tiny-test", skip="gated")).layer(taker).junction
    width, other = junction.gate.in_channels, _skip_channels("unet-tiny-test", taker)
    assert (width != other) is is_projected
    x, skip = (torch.randn(2, channels, 3, 3, dtype=torch.float64) for channels in (width, other))
    gate = torch.sigmoid(torch.einsum("oi,bihw->bohw", junction.gate.weight[..., 0, 0], x) + _column(junction.gate))
    projected = skip
    if is_projected:
        weight = junction.project.weight[..., 0, 0]
        projected = torch.einsum("oi,bihw->bohw", weight, skip) + _column(junction.project)
    torch.testing.assert_close(junction(x, skip, x), gate * x + (1 - gate) * projected)


def _column(conv: torch.nn.Conv2d) -> Tensor:
    assert conv.bias is not None
    return conv.bias[:, None, None]
