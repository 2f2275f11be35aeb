"""Crops and colours against independent references, decided by the sample alone."""

import colorsys
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megadiff.data.augment import Augmentation, crop, hsv_to_rgb, jitter, rgb_to_hsv

EVERYTHING = Augmentation(flip=True, random_crop=0.3, hsv_jitter=(0.1, 0.4, 0.4))
UNIT = st.floats(0.0, 1.0, width=32)


def pictures(num: int, side: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(num, 3, side, side, generator=generator) * 2 - 1


@given(rgb=st.tuples(UNIT, UNIT, UNIT))
def test_d5_colours_turn_as_in_colorsys(rgb: tuple[float, float, float]) -> None:
    pixel = torch.tensor(rgb, dtype=torch.float64).view(1, 3, 1, 1)
    hsv = rgb_to_hsv(pixel)
    hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
    found = hsv.flatten().tolist()
    assert found[1:] == pytest.approx([saturation, value], abs=1e-12)
    # The hue is an angle: 0 and 1 are one.
    assert math.cos(2 * math.pi * (found[0] - hue)) == pytest.approx(1.0, abs=1e-9)
    torch.testing.assert_close(hsv_to_rgb(hsv), pixel, rtol=0, atol=1e-9)


def test_a_jitter_of_nothing_changes_nothing() -> None:
    images = pictures(4)
    torch.testing.assert_close(jitter(images, torch.zeros(4, 3)), images, rtol=0, atol=1e-5)


def test_d5_a_dull_picture_becomes_more_colourful() -> None:
    dull = torch.tensor([0.5, 0.45, 0.4]).view(1, 3, 1, 1).expand(1, 3, 2, 2) * 2 - 1
    found = rgb_to_hsv((jitter(dull, torch.tensor([[0.0, 0.5, 0.2]])) + 1) / 2)
    before = rgb_to_hsv((dull + 1) / 2)
    torch.testing.assert_close(found[:, 1], before[:, 1] * 1.5, rtol=1e-4, atol=0)
    torch.testing.assert_close(found[:, 2], before[:, 2] * 1.2, rtol=1e-4, atol=0)


def test_a_crop_of_everything_changes_nothing() -> None:
    images = pictures(3)
    torch.testing.assert_close(crop(images, torch.ones(3), torch.rand(3, 2)), images, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("places", "rows", "columns"), [((0, 0), (0, 4), (0, 4)), ((1, 0), (0, 4), (4, 8))])
def test_d5_a_half_is_the_enlarged_corner(
    places: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Linear pictures are enlarged exactly, away from the border where bilinear interpolation holds the edge."""
    ramp = torch.arange(8.0).expand(1, 3, 8, 8) + 10 * torch.arange(8.0).view(8, 1)
    found = crop(ramp, torch.tensor([0.5]), torch.tensor([places], dtype=torch.float32))
    centres = (torch.arange(8.0) + 0.5) / 2 - 0.5
    expected = (columns[0] + centres) + 10 * (rows[0] + centres).view(8, 1)
    torch.testing.assert_close(found[0, 0, 1:-1, 1:-1], expected[1:-1, 1:-1], rtol=0, atol=1e-4)


def test_every_sample_is_augmented_alike_in_any_batch() -> None:
    images, ids = pictures(6), torch.tensor([5, 9, 2**40, 0, 77, 3])
    whole = EVERYTHING.apply(images, 3, ids)
    parts = [EVERYTHING.apply(images[rows], 3, ids[rows]) for rows in ([0, 1], [2], [3, 4, 5])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)
    assert not torch.equal(EVERYTHING.apply(images, 4, ids), whole), "the seed decides"
    assert float(whole.abs().max()) <= 1.0 + 1e-6


def test_nothing_asked_for_is_nothing_done() -> None:
    images = pictures(2)
    assert Augmentation().apply(images, 0, torch.arange(2)) is images


def test_flips_are_those_of_before_whatever_else_is_on() -> None:
    ramp, ids = torch.arange(8.0).expand(50, 3, 8, 8) / 4 - 1, torch.arange(50)
    alone = Augmentation(flip=True).apply(ramp, 1, ids)[:, 0, 0, 0] > 0
    both = Augmentation(flip=True, random_crop=0.2).apply(ramp, 1, ids)
    assert torch.equal(both[:, 0, 0, 0] > both[:, 0, 0, -1], alone) and 10 < int(alone.sum()) < 40
