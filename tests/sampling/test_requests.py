"""Lists of pictures: what a line may say, and which lines go through the network together."""

import json
from pathlib import Path
from typing import Any

import pytest

from megadiff.config.load import load_config
from megadiff.config.schema import Config, SamplingConfig
from megadiff.engine.conditions import Conditions
from megadiff.errors import DataError
from megadiff.sampling.requests import BadLine, Line, batches, read_requests

CLASSES = Conditions("class", ["cat", "dog", "7"], range(3))


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(None, {"sampling.steps": 30, "sampling.guidance": 3.0})


def read(tmp_path: Path, config: Config, *lines: Any) -> tuple[list[Line], list[BadLine]]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "list.jsonl").write_text(text, encoding="utf-8")
    return read_requests(tmp_path / "list.jsonl", config, CLASSES.take)


def test_a_line_says_what_differs_from_the_run(tmp_path: Path, config: Config) -> None:
    lines, bad = read(
        tmp_path,
        config,
        {"class": "dog"},
        "",
        {"class": 0, "seed": 2**63 - 1, "image": 5, "solver": "unipc", "steps": 7},
        {"class": "7", "guidance": 1, "seed": 4},
    )
    assert not bad and [line.number for line in lines] == [1, 3, 4]
    assert [(line.name, line.condition) for line in lines] == [("dog", 1), ("cat", 0), ("7", 2)]
    assert [(line.seed, line.image) for line in lines] == [(0, 0), (2**63 - 1, 5), (4, 0)]
    assert lines[0].sampling == config.sampling
    assert lines[1].sampling == config.sampling.model_copy(update={"solver": "unipc", "steps": 7})
    assert lines[2].sampling == config.sampling.model_copy(update={"guidance": 1.0})
    assert [line.file_name for line in lines] == ["000001.png", "000003.png", "000004.png"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{class: dog}", "not JSON"),
        ([1], "not an object"),
        ({}, 'no class is given; write for example "class": "cat"'),
        ({"class": "dgo"}, "class dgo is not a class of this network; did you mean dog?"),
        ({"class": 3}, "class 3 is not a class of this network; use one of cat, dog, 7"),
        ({"class": "dog", "seed": -1}, "seed = -1 is not a whole number"),
        ({"class": "dog", "seed": 1.5}, "seed = 1.5 is not a whole number"),
        ({"class": "dog", "image": True}, "image = True is not a whole number"),
        ({"class": "dog", "solver": "unipic"}, "did you mean unipc?"),
        ({"class": "dog", "stepz": 3}, "unknown key sampling.stepz in the request; did you mean sampling.steps?"),
        ({"class": "dog", "steps": 2000}, "sampling.steps = 2000 is above diffusion.num_train_timesteps = 1000"),
        ({"class": "dog", "steps": "ten"}, "sampling.steps = 'ten' in the request is not accepted"),
        ({"class": "dog", "solver": "ddpm", "eta": 0.5}, "sampling.eta = 0.5 has no effect"),
    ],
)
def test_a_bad_line_is_numbered_and_the_rest_goes_on(tmp_path: Path, config: Config, line: Any, reason: str) -> None:
    lines, bad = read(tmp_path, config, {"class": "cat"}, line, {"class": "dog"})
    assert [line.number for line in lines] == [1, 3]
    assert len(bad) == 1 and str(bad[0]).startswith("line 2: ") and reason in bad[0].reason


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, config: Config) -> None:
    (tmp_path / "list.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("list.jsonl", "absent.jsonl"):
        with pytest.raises(DataError, match=rf"{name} cannot be read .*one JSON object a line"):
            read_requests(tmp_path / name, config, CLASSES.take)


def test_conditions_of_other_networks() -> None:
    assert Conditions("none", ["image"], [0]).take({"seed": 1}) == ("image", 0)
    values: dict[str, Any] = {"text": 1, "seed": 3}
    assert Conditions("text", ["text 0", "text 1"], [10, 11]).take(values) == ("text 1", 11)
    assert values == {"seed": 3}


def test_batches_hold_equal_settings_and_every_rank_has_some() -> None:
    fast, slow = SamplingConfig(steps=5), SamplingConfig(steps=50)
    lines = [Line(number, "cat", 0, number, 0, slow if number % 3 == 0 else fast) for number in range(1, 13)]
    found = batches(lines, batch_size=3, ranks=2)
    assert [[line.number for line in batch] for batch in found] == [[1, 2, 4], [5, 7, 8], [10, 11], [3, 6], [9, 12]]
    assert [len(batch) for batch in batches(lines[:2], batch_size=64, ranks=2)] == [1, 1]
    assert batches([], 4, 2) == []
