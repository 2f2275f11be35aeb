"""The little language of `data.classes` for the emoji pictures.

An entry is the name of a group (`flag`), or `LABEL=GROUPS` or `LABEL=GROUPS:WORDS`; `+` joins sources:

    clock=time:clock                    pictures of the group `time` whose Unicode name holds the word "clock"
    face=face-smiling|face-affection    all pictures of two groups
    animal=animal-*:face                `*` stands for any letters in a group's name
    moon=sky & weather:moon -face       the word "moon" but not the word "face"
    round=geometric:circle+time:clock face|timer clock

GROUPS are sub-groups or categories of Unicode; `|` separates alternatives of groups or of words. Of words
separated by spaces each must occur, a word after `-` must not. Capital letters make no difference.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megadiff.data.dataset import nearest_name
from megadiff.errors import DataError


@dataclass(frozen=True)
class Source:
    """Pictures of any of the groups whose names satisfy any of the word lists.

    Attributes:
        groups: lower-case patterns of group names.
        words: lists of lower-case words, those to avoid with a leading `-`; no list at all admits every name.
    """

    groups: tuple[str, ...]
    words: tuple[tuple[str, ...], ...] = ()

    def admits(self, groups: Collection[str], name: str) -> bool:
        """Tell whether a picture of these lower-case groups with this Unicode name belongs here."""
        if not any(fnmatchcase(group, pattern) for group in groups for pattern in self.groups):
            return False
        present = set(re.findall(r"\w+", name.lower()))
        return not self.words or any(_holds(present, words) for words in self.words)


@dataclass(frozen=True)
class EmojiClass:
    """One class: its label and the sources of its pictures."""

    label: str
    sources: tuple[Source, ...]

    def admits(self, groups: Collection[str], name: str) -> bool:
        """Tell whether a picture of these lower-case groups with this Unicode name is of this class."""
        return any(source.admits(groups, name) for source in self.sources)


def parse_class(entry: str, groups: Collection[str]) -> EmojiClass:
    """Parse an entry of `data.classes`.

    Args:
        entry: see the top of this file.
        groups: the names of all groups.

    Raises:
        DataError: the entry is malformed, or no group has a name that it uses.
    """
    label, equals, sources = entry.partition("=")
    parts = sources.split("+") if equals else [label]
    if not label.strip() or not all(part.strip() for part in parts):
        raise DataError(f"data.classes: {entry!r} is incomplete; write GROUP, LABEL=GROUPS or LABEL=GROUPS:WORDS")
    return EmojiClass(label.strip(), tuple(_parse_source(entry, part, groups) for part in parts))


def _parse_source(entry: str, text: str, groups: Collection[str]) -> Source:
    patterns, colon, words = text.lower().partition(":")
    source = Source(
        groups=tuple(pattern.strip() for pattern in patterns.split("|")),
        words=tuple(tuple(words_of_one.split()) for words_of_one in words.split("|")) if colon else (),
    )
    if not all(source.words):
        raise DataError(f"data.classes: {entry!r} has an empty list of words; remove its ':' or '|'")
    known = [group.lower() for group in groups]
    for pattern in source.groups:
        if not any(fnmatchcase(group, pattern) for group in known):
            raise DataError(
                f"data.classes: {entry!r} uses the unknown group {pattern!r}; {nearest_name(pattern, known)}"
            )
    return source


def _holds(present: set[str], words: tuple[str, ...]) -> bool:
    """Tell whether every word occurs and no word after `-` does."""
    return all((word[1:] not in present) if word.startswith("-") else (word in present) for word in words)
