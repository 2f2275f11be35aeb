"""Dropout on CPU: the right share, the right scale, byte masks in any layout, and a backward pass of the same mask."""

import pytest
import torch
from torch import Tensor

from megadiff.models.dropout import Dropout, drop

SHAPES = [(7,), (5, 3), (16, 24, 10, 10), (3, 5, 7, 9)]


def ones(shape: tuple[int, ...], channels_last: bool) -> Tensor:
    x = torch.ones(shape)
    return x.contiguous(memory_format=torch.channels_last) if channels_last and x.dim() == 4 else x


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kept_elements_are_scaled_and_others_are_zero(shape: tuple[int, ...], channels_last: bool) -> None:
    torch.manual_seed(0)
    x = ones(shape, channels_last).requires_grad_()
    y = drop(x, 0.25)
    assert y.shape == x.shape and y.stride() == x.stride()
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 4 / 3))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # the mask and the scale again


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_the_share_and_the_mean_are_those_of_independent_draws(probability: float) -> None:
    torch.manual_seed(1)
    count = 400_000
    y = drop(torch.ones(count // 8, 8), probability)
    deviation = (probability * (1 - probability) / count) ** 0.5
    assert abs(float((y == 0).double().mean()) - probability) < 5 * deviation
    assert abs(float(y.double().mean()) - 1) < 5 * deviation / (1 - probability)
    dropped = (y == 0).double()
    share = dropped.mean(0)  # each of the four draws of a word, twice
    assert float((share - probability).abs().max()) < 6 * deviation * 8**0.5
    pairs = (dropped[:, 0] * dropped[:, 1]).mean()
    assert abs(float(pairs) - probability**2) < 6 * (probability**2 / (count // 8)) ** 0.5


def test_almost_one_keeps_a_finite_scale() -> None:
    assert drop(torch.ones(1000), 0.9999999).isfinite().all()


def test_the_mask_is_kept_as_bytes() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        drop(x, 0.5)
    assert [t.dtype for t in saved] == [torch.bool]


def test_equal_seeds_draw_equal_masks_and_evaluation_draws_none() -> None:
    layer, x = Dropout(0.5), torch.ones(100)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    assert torch.equal(layer.eval()(x), x)
