"""Pictures: exact 8-bit values, grids with one row a class, PNG files that read back."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megadiff.errors import DataError
from megadiff.sampling.images import grid, save_png, to_uint8


def test_every_level_survives_the_round_trip() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(to_uint8(levels.to(dtype) / 127.5 - 1.0), levels)


def test_values_are_rounded_and_clamped() -> None:
    values = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0, float("inf"), float("-inf"), float("nan")])
    assert to_uint8(values).tolist() == [0, 0, 128, 255, 255, 255, 0, 0]


@given(num=st.integers(1, 7), columns=st.integers(1, 4), scale=st.integers(1, 3), gap=st.integers(0, 2))
def test_every_picture_lies_in_its_cell(num: int, columns: int, scale: int, gap: int) -> None:
    height, width = 2, 3
    pictures = torch.arange(num * 3 * height * width).view(num, 3, height, width).to(torch.uint8)
    canvas = grid(pictures, columns, scale=scale, gap=gap)
    rows = -(-num // columns)
    assert canvas.shape == (3, rows * (scale * height + gap) + gap, columns * (scale * width + gap) + gap)
    covered = torch.zeros(canvas.shape[1:], dtype=torch.bool)
    for i in range(num):
        row, column = divmod(i, columns)
        for y in range(scale * height):
            for x in range(scale * width):
                at = (gap + row * (scale * height + gap) + y, gap + column * (scale * width + gap) + x)
                assert torch.equal(canvas[:, at[0], at[1]], pictures[i, :, y // scale, x // scale])
                covered[at] = True
    assert bool((canvas[:, ~covered] == 255).all())


def test_small_pictures_are_enlarged_until_they_are_visible() -> None:
    assert grid(torch.zeros(1, 3, 16, 16), columns=1, gap=0).shape == (3, 64, 64)
    assert grid(torch.zeros(1, 3, 28, 28), columns=1, gap=0).shape == (3, 84, 84)
    assert grid(torch.zeros(1, 3, 128, 128), columns=1, gap=0).shape == (3, 128, 128)


@pytest.mark.parametrize("channels", [1, 3])
def test_png_reads_back(tmp_path: Path, channels: int) -> None:
    image = torch.rand(channels, 5, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    path = tmp_path / "new" / "image.png"
    save_png(image, path)
    with Image.open(path) as opened:
        assert opened.mode == ("L" if channels == 1 else "RGB")
        read = np.asarray(opened).reshape(5, 4, channels)
    assert np.array_equal(read, to_uint8(image).permute(1, 2, 0).numpy())


def test_latents_are_not_saved_as_a_picture(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\(4, 8, 8\).*1 or 3 channels"):
        save_png(torch.zeros(4, 8, 8), tmp_path / "latent.png")
