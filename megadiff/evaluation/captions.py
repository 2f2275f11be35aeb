"""What generated pictures were meant to show: a text for each file."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from megadiff.errors import DataError

FILE = "captions.jsonl"
_NUMBER = re.compile(r"^\d+(_|$)")


def read_captions(folder: Path, names: Sequence[str]) -> tuple[list[str], str]:
    """The text of each picture, and where it comes from.

    A file `captions.jsonl` in the folder has a line {"file_name": ..., "text": ...} for each. Without it the words of
    a file's name are its text, as `megadiff sample` writes them: `00005_red_panda.png` is "red panda".

    Args:
        folder: of the pictures.
        names: their paths in it.

    Raises:
        DataError: a line is malformed, a picture has no line, or its name no words.
    """
    file = folder / FILE
    if not file.is_file():
        return [_words(folder, name) for name in names], "file names"
    texts = _read(file)
    for name in names:
        if name not in texts:
            raise DataError(f"{file} has no line for {name}; add one")
    return [texts[name] for name in names], FILE


def _words(folder: Path, name: str) -> str:
    words = _NUMBER.sub("", Path(name).stem).replace("_", " ").strip()
    if not words:
        raise DataError(f'{folder / name} has no words in its name; add {FILE} with lines {{"file_name", "text"}}')
    return words


def _read(file: Path) -> dict[str, str]:
    texts = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            name, text = entry["file_name"], entry["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f'line {number} of {file} is not {{"file_name": ..., "text": ...}}; mend it') from error
        texts[str(name)] = str(text)
    return texts
