"""Texts of pictures, from a file or from the names that `megadiff sample` gives."""

import json
from pathlib import Path

import pytest

from megadiff.errors import DataError
from megadiff.evaluation.captions import read_captions


def test_words_of_the_file_name(tmp_path: Path) -> None:
    names = ["00005_red_panda.png", "a/12_clock.jpg", "blue car.png"]
    assert read_captions(tmp_path, names) == (["red panda", "clock", "blue car"], "file names")
    with pytest.raises(DataError, match=r"00007\.png has no words in its name; add captions\.jsonl"):
        read_captions(tmp_path, ["00007.png"])


def test_a_file_of_captions_comes_first(tmp_path: Path) -> None:
    lines = [{"file_name": "1_x.png", "text": "a red fox"}, {"file_name": "a/2.png", "text": "ein Haus, grün"}]
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_captions(tmp_path, ["a/2.png", "1_x.png"]) == (["ein Haus, grün", "a red fox"], "captions.jsonl")
    with pytest.raises(DataError, match=r"captions\.jsonl has no line for 3_y\.png; add one"):
        read_captions(tmp_path, ["1_x.png", "3_y.png"])


@pytest.mark.parametrize("line", ["no JSON", '{"file_name": "1.png"}', "[1]"])
def test_a_malformed_line_is_told_by_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "captions.jsonl").write_text('{"file_name": "1.png", "text": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"line 2 of .*captions\.jsonl is not"):
        read_captions(tmp_path, ["1.png"])
