"""The entries of data.classes for emoji."""

import pytest

from megadiff.data.emoji_classes import parse_class
from megadiff.errors import DataError

GROUPS = ("time", "geometric", "face-smiling", "face-affection", "sky & weather", "animal-mammal", "Flags")


def admits(entry: str, group: str, name: str) -> bool:
    return parse_class(entry, GROUPS).admits((group.lower(), "some category"), name)


@pytest.mark.parametrize(
    ("entry", "group", "name", "expected"),
    [
        ("time", "time", "WATCH", True),
        ("time", "geometric", "WATCH", False),
        ("clock=time:clock", "time", "ALARM CLOCK", True),
        ("clock=time:clock", "time", "WATCH", False),
        ("clock=time:clock", "geometric", "ALARM CLOCK", False),
        ("clock=time:lock", "time", "ALARM CLOCK", False),
        ("half=time:clock thirty", "time", "CLOCK FACE ONE-THIRTY", True),
        ("half=time:clock thirty", "time", "CLOCK FACE ONE OCLOCK", False),
        ("time piece=time:watch|hourglass", "time", "HOURGLASS", True),
        ("time piece=time:watch|hourglass", "time", "ALARM CLOCK", False),
        ("face=face-smiling|face-affection", "face-affection", "KISSING FACE", True),
        ("face=face-*", "face-affection", "KISSING FACE", True),
        ("face=face-*", "animal-mammal", "CAT FACE", False),
        ("moon=sky & weather:moon -face", "sky & weather", "CRESCENT MOON", True),
        ("moon=sky & weather:moon -face", "sky & weather", "FULL MOON WITH FACE", False),
        ("round=geometric:circle+time:clock", "time", "TIMER CLOCK", True),
        ("round=geometric:circle+time:clock", "geometric", "LARGE RED CIRCLE", True),
        ("round=geometric:circle+time:clock", "geometric", "LARGE RED SQUARE", False),
        ("flags", "Flags", "Flag of Peru", True),
        ("FLAG=Flags:PERU", "Flags", "Flag of Peru", True),
    ],
)
def test_an_entry_selects_by_group_and_words(entry: str, group: str, name: str, expected: bool) -> None:
    assert admits(entry, group, name) is expected


def test_the_label_is_what_stands_before_the_sign() -> None:
    assert parse_class("animal face = animal-*:face", GROUPS).label == "animal face"
    assert parse_class("time", GROUPS).label == "time"


def test_an_unknown_group_proposes_the_nearest() -> None:
    with pytest.raises(DataError, match=r"unknown group 'tiem'; did you mean 'time'"):
        parse_class("clock=tiem:clock", GROUPS)


@pytest.mark.parametrize("entry", ["", "=time", "clock=", "clock=time+", "clock=time:", "clock=time:a|"])
def test_an_incomplete_entry_is_refused(entry: str) -> None:
    with pytest.raises(DataError, match=r"data.classes"):
        parse_class(entry, GROUPS)
