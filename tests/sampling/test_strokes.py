"""The detector of writing: letters of several sizes and colours, not emoji, edges, stripes or blobs."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from megadiff.data.emoji import open_emoji
from megadiff.errors import ConfigError
from megadiff.sampling.strokes import find_strokes, load_detector
from tests.sampling.networks import sees_text

Colour = tuple[int, int, int]
WORDS = ("Hello world\nmegadiff\nSALE 50%", "the quick brown\nfox jumps over\nthe lazy dog 123")


def written(words: str, size: int, pixels: int, colour: Colour, ground: Colour) -> Tensor:
    picture = Image.new("RGB", (pixels, pixels), ground)
    ImageDraw.Draw(picture).multiline_text((2, 2), words, fill=colour, font=ImageFont.load_default(size))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1


@pytest.mark.parametrize("pixels", [64, 128])
@pytest.mark.parametrize("size", [9, 11, 14, 18])
@pytest.mark.parametrize(
    ("colour", "ground"), [((0, 0, 0), (255, 255, 255)), ((255, 255, 0), (20, 20, 120))], ids=["black", "yellow"]
)
def test_writing_is_found(pixels: int, size: int, colour: Colour, ground: Colour) -> None:
    for words in WORDS:
        assert find_strokes(written(words, size, pixels, colour, ground)).tolist() == [True]


def test_few_emoji_look_like_writing() -> None:
    dataset = open_emoji(64, "subgroup")
    images = torch.stack([dataset.load(index)[0] for index in range(0, len(dataset), 9)])
    assert float(find_strokes(images).double().mean()) < 0.05


def test_edges_stripes_and_flat_areas_are_no_writing() -> None:
    flat = torch.zeros(1, 3, 64, 64)
    edge = flat.clone()
    edge[..., 32:] = 1.0
    stripes = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(16).expand(1, 3, 64, 64)
    assert find_strokes(torch.cat((flat, edge, stripes, stripes.transpose(2, 3)))).tolist() == [False] * 4


@pytest.mark.parametrize("side", [1, 2, 3, 8])
def test_small_pictures_are_taken(side: int) -> None:
    assert find_strokes(torch.randn(2, 1, side, side)).shape == (2,)


def test_detectors_are_named() -> None:
    assert load_detector("strokes") is find_strokes
    assert load_detector("tests.sampling.networks:sees_text") is sees_text
    for name in ("stroke", "no.such.module:f", "math:no_such", ":f"):
        with pytest.raises(
            ConfigError, match=r"text_guard = .* is not there .*use strokes, ocr or package\.module:function"
        ):
            load_detector(name)
    with pytest.raises(ConfigError, match="is not a function"):
        load_detector("math:pi")
