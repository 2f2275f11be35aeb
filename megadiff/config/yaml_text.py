"""YAML text to plain values and back, with the scalars of YAML 1.2: `1e-4` is a number and `no` is a word."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from megadiff.errors import ConfigError

_SCALARS = (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("tag:yaml.org,2002:int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|nan))$",
        "-+0123456789.",
    ),
)


class _Loader(yaml.SafeLoader):
    """Reads plain values only and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise ConfigError(f"key {key_node.value!r} is given twice (line {key_node.start_mark.line + 1})")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the strings that `_Loader` would read as something else."""


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, 10)


# The classes start without YAML 1.1's rules, by which `no` is false, `010` is eight and `1e-4` is a text.
_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
    for _kind in (_Loader, _Dumper):
        # PyYAML looks an empty scalar up under the empty string.
        _kind.add_implicit_resolver(_tag, re.compile(_pattern), ["" if c == "\0" else c for c in _first])
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_value(text: str) -> Any:
    """Read one value as it is written on a command line: `1e-4`, `true`, `null`, `[a, b]`, `word`."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is not a YAML value: {_describe(error)}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping (an empty file is an empty mapping)."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config {path}: {_describe(error)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path} is not YAML: {_describe(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"config {path}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config {path} holds a {type(values).__name__}; expected sections such as `train:`")
    return values


def dump_yaml(values: dict[str, Any]) -> str:
    """Write plain values so that `read_yaml` gives exactly them back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=110)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return " ".join(str(error).split())
