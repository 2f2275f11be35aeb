"""Every class is shown equally often, and nothing of a class is left out."""

from collections import Counter

import pytest
import torch

from megadiff.data.balanced import BalancedDataset, without_repeats
from megadiff.data.dataset import InMemoryDataset
from megadiff.errors import DataError


def pictures(labels: tuple[int, ...], classes: int) -> InMemoryDataset:
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    return InMemoryDataset(pixels, labels, tuple("abc"[:classes]), "f")


def test_classes_are_equally_frequent_and_complete() -> None:
    source = pictures((0, 0, 0, 0, 0, 1, 1, 2), 3)
    view = BalancedDataset(source)
    assert Counter(view.labels) == {0: 5, 1: 5, 2: 5}
    shown = Counter(round(float((view.load(i)[0][0, 0, 0] + 1) * 127.5)) for i in range(len(view)))
    assert set(shown) == set(range(8))
    assert shown[5] == 3 and shown[6] == 2 and shown[7] == 5
    assert [view.load(i)[1] for i in range(len(view))] == view.labels
    assert view.fingerprint != source.fingerprint


def test_without_repeats_each_picture_counts_once() -> None:
    source = pictures((0, 0, 1), 2)
    assert without_repeats(BalancedDataset(source)) is source and without_repeats(source) is source


def test_a_class_without_pictures_is_named() -> None:
    with pytest.raises(DataError, match="none of b"):
        BalancedDataset(pictures((0, 2), 3))
