"""Attention within tiles of a map: the tiles themselves, and attention against a loop over them."""

import pytest
import torch

from megadiff.models.layers import Attention, from_tiles, to_tiles


def attention(tile: int) -> Attention:
    """Four heads of three channels with the same random values at every tile size."""
    layer = Attention(12, 4, False, 0.0, tile=tile).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return layer


@pytest.mark.parametrize("tile", [1, 2, 3])
def test_tiles_are_squares_of_the_map(tile: int) -> None:
    side, heads, dim = 6, 2, 5
    x = torch.randn(3, heads, side * side, dim)
    tiles = to_tiles(x, side, tile)
    count = side // tile
    squares = x.view(3, heads, side, side, dim)
    for sample in range(3):
        for row in range(count):
            for column in range(count):
                square = squares[sample, :, row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
                found = tiles[(sample * count + row) * count + column]
                assert torch.equal(found, square.reshape(heads, tile * tile, dim))
    assert torch.equal(from_tiles(tiles, side, tile), x)


@pytest.mark.parametrize("tile", [1, 2, 4])
def test_tiled_attention_equals_a_loop_over_tiles(tile: int) -> None:
    side = 8
    x = torch.randn(2, side * side, 12, dtype=torch.float64)
    index = torch.arange(side * side).view(side, side)
    expected = torch.empty_like(x)
    for row in range(0, side, tile):
        for column in range(0, side, tile):
            tokens = index[row : row + tile, column : column + tile].flatten()
            expected[:, tokens] = attention(tile=0)(x[:, tokens])
    torch.testing.assert_close(attention(tile)(x), expected)


@pytest.mark.parametrize("tile", [4, 8])
def test_a_tile_of_the_whole_map_is_plain_attention(tile: int) -> None:
    x = torch.randn(2, 16, 12, dtype=torch.float64)
    assert torch.equal(attention(tile)(x), attention(0)(x))


def test_gradients_stay_within_tiles() -> None:
    x = torch.randn(1, 16, 12, dtype=torch.float64, requires_grad=True)
    attention(2)(x)[0, 0].sum().backward()
    reached = x.grad[0].abs().amax(dim=1) > 0
    assert reached.nonzero().flatten().tolist() == [0, 1, 4, 5]
