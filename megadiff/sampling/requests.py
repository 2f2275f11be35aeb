"""A file of pictures to make, one JSON object a line: reading it, and which lines go through the network together.

`{"class": "clock", "seed": 7, "image": 0, "solver": "dpmpp_2m", "steps": 12}`: `seed` and `image` number the noise as
`--seed` and the place of an image in its batch do; any setting of `sampling` may stand there, and is as in the run if
not. What the condition is called depends on the network, see `megadiff.cli_sample`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadiff.config.load import config_from_dict, config_to_dict
from megadiff.config.schema import Config, SamplingConfig
from megadiff.diffusion.condition import Condition
from megadiff.errors import DataError, MegadiffError

# From the values of a line takes out those that say what to show, and returns its name and the condition.
TakeCondition = Callable[[dict[str, Any]], tuple[str, Condition]]


@dataclass(frozen=True)
class Line:
    """One picture to make.

    Attributes:
        number: of the line, from 1.
        name: of the condition.
        condition: class or text.
        seed, image: fix the noise.
        sampling: the settings.
    """

    number: int
    name: str
    condition: Condition
    seed: int
    image: int
    sampling: SamplingConfig

    @property
    def file_name(self) -> str:
        return f"{self.number:06d}.png"


@dataclass(frozen=True)
class BadLine:
    """A line that asks for something impossible."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


def read_requests(path: Path, config: Config, take_condition: TakeCondition) -> tuple[list[Line], list[BadLine]]:
    """The good and the bad lines of a file; empty lines are neither.

    Args:
        path: a text file.
        config: of the network, whose sampling settings hold where a line says nothing.
        take_condition: see TakeCondition.

    Raises:
        DataError: there is no such text file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); give a text file with one JSON object a line") from None
    good: list[Line] = []
    bad: list[BadLine] = []
    known: dict[str, SamplingConfig] = {}  # settings are checked once
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                good.append(_read(number, line, config, take_condition, known))
            except MegadiffError as error:
                bad.append(BadLine(number, str(error)))
    return good, bad


def batches(lines: Sequence[Line], batch_size: int, ranks: int) -> list[list[Line]]:
    """Lines of equal settings together, in the order of the file, at most `batch_size` each and spread over `ranks`."""
    alike: dict[str, list[Line]] = {}
    for line in lines:
        alike.setdefault(line.sampling.model_dump_json(), []).append(line)
    found = []
    for group in alike.values():
        size = min(batch_size, -(-len(group) // ranks))
        found += [group[start : start + size] for start in range(0, len(group), size)]
    return found


def _read(
    number: int, line: str, config: Config, take_condition: TakeCondition, known: dict[str, SamplingConfig]
) -> Line:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON ({error})") from None
    if not isinstance(values, dict):
        raise DataError('not an object; write for example {"seed": 1}')
    seed, image = (_take_count(values, name, limit) for name, limit in (("seed", 2**63), ("image", 2**56)))
    name, condition = take_condition(values)
    key = json.dumps(values, sort_keys=True)
    if key not in known:
        known[key] = with_sampling(config, values).sampling
    return Line(number, name, condition, seed, image, known[key])


def with_sampling(config: Config, values: dict[str, Any]) -> Config:
    """The config with other values in its section `sampling`, checked as a whole.

    Raises:
        ConfigError: an unknown name, or a value that cannot be.
    """
    whole = config_to_dict(config)
    whole["sampling"] |= values
    return config_from_dict(whole, "the request")


def _take_count(values: dict[str, Any], name: str, limit: int) -> int:
    count = values.pop(name, 0)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < limit:
        raise DataError(f"{name} = {count!r} is not a whole number from 0 on")
    return count
