"""The guard that reads: writing of several sizes is found, emoji without writing are not."""

import sys

import pytest
import torch

from megadiff.data.emoji import open_emoji
from megadiff.errors import ConfigError
from megadiff.sampling.ocr import open_reader
from megadiff.sampling.strokes import load_detector
from tests.sampling.test_strokes import WORDS, written


@pytest.mark.parametrize(("pixels", "size"), [(64, 9), (64, 14), (128, 11)])
def test_writing_is_read(pixels: int, size: int) -> None:
    images = torch.cat([written(words, size, pixels, (255, 255, 0), (20, 20, 120)) for words in WORDS])
    find_text = load_detector("ocr")
    assert find_text(images).tolist() == [True, True]
    assert find_text(images[:, 2:]).tolist() == [True, True], "one channel is grey"


def test_few_emoji_have_something_to_read() -> None:
    dataset = open_emoji(64, "subgroup")
    images = torch.stack([dataset.load(index)[0] for index in range(0, len(dataset), 120)])
    # Two of these 16 say 999 and abc.
    assert float(load_detector("ocr")(images).double().mean()) < 0.2
    assert load_detector("ocr")(torch.zeros(1, 3, 8, 8)).tolist() == [False]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ConfigError, match=r"text_guard = ocr needs rapidocr .*megadiff\[ocr\].*strokes"):
        open_reader.__wrapped__()
