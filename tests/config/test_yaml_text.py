"""The scalars of a config file and of a command line."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadiff.config.yaml_text import dump_yaml, parse_value, read_yaml
from megadiff.errors import ConfigError

SCALARS = [
    ("1e-4", 1e-4),
    ("1E6", 1e6),
    ("-2.5", -2.5),
    (".5", 0.5),
    ("1.", 1.0),
    ("7", 7),
    ("-7", -7),
    ("010", 10),
    ("true", True),
    ("False", False),
    ("no", "no"),
    ("on", "on"),
    ("null", None),
    ("", None),
    ("12:30", "12:30"),
    ("word", "word"),
    ("DiT-XL/2", "DiT-XL/2"),
    ("[a, b]", ["a", "b"]),
    ("[a,1e-3]", ["a", 1e-3]),
    ("[]", []),
    ("'1e-4'", "1e-4"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalar_is_read_as_yaml_1_2(text: str, value: object) -> None:
    result = parse_value(text)
    assert result == value
    assert type(result) is type(value)


def test_infinity_is_a_float() -> None:
    assert parse_value("-.inf") == -math.inf


def test_broken_value_is_reported() -> None:
    with pytest.raises(ConfigError, match="not a YAML value"):
        parse_value("[a, b")


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(min_size=1), plain | st.lists(plain), max_size=5))
def test_dump_and_read_are_inverse(tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]) -> None:
    path = tmp_path_factory.mktemp("yaml") / "c.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    result = read_yaml(path)
    assert result == values
    assert [type(v) for v in result.values()] == [type(v) for v in values.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: 1\na: 2\n", "given twice"), ("- 1\n", "holds a list"), ("a: [1\n", "is not YAML")],
)
def test_bad_file_is_reported_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_yaml(path)
    assert "bad.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config .*nothing\.yaml"):
        read_yaml(tmp_path / "nothing.yaml")
