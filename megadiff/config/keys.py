"""Dotted names of all settings: listing, looking up, flattening, and the nearest name to a misspelt one."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from megadiff.config.schema import Config, Section
from megadiff.errors import ConfigError


def _section_types() -> dict[str, type[Section]]:
    annotations = {name: field.annotation for name, field in Config.model_fields.items()}
    return {n: a for n, a in annotations.items() if isinstance(a, type) and issubclass(a, Section)}


SECTIONS = _section_types()
FIELDS: dict[str, FieldInfo] = {
    f"{section}.{name}": field for section, kind in SECTIONS.items() for name, field in kind.model_fields.items()
}


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "did you mean `x`?; " for the most similar known name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {matches[0]}? " if matches else ""


def unknown_key(name: str, source: str) -> ConfigError:
    """Build the error for a dotted name that no setting has."""
    hint = nearest_key(name) or nearest(name, Config.model_fields)
    return ConfigError(f"unknown key {name} in {source}; {hint or 'see --help for all keys'}".strip())


def nearest_key(name: str, prefix: str = "") -> str:
    """Return "did you mean `x`? " for a misspelt dotted name: the same word elsewhere, or a similar one."""
    section, _, leaf = name.rpartition(".")
    same_leaf = [f"{prefix}{key}" for key in FIELDS if key.rpartition(".")[2] == leaf]
    if same_leaf:
        return nearest(f"{prefix}{name}", same_leaf, cutoff=0.0)
    siblings = [f"{prefix}{key}" for key in FIELDS if key.startswith(f"{section}.")]
    return nearest(f"{prefix}{name}", siblings) or nearest(f"{prefix}{name}", [f"{prefix}{key}" for key in FIELDS])


def check_names(values: Mapping[Any, Any], source: str) -> None:
    """Refuse every key of a nested mapping that the schema does not have.

    The content of `deepspeed` is checked by `deepspeed_json`, against its own table.
    """
    for section, content in values.items():
        if section not in Config.model_fields:
            raise unknown_key(str(section), source)
        if not isinstance(content, Mapping):
            raise ConfigError(f"{section} = {content!r} in {source} is not a section; expected keys under it")
        if section == "deepspeed":
            continue
        for name in content:
            if f"{section}.{name}" not in FIELDS:
                raise unknown_key(f"{section}.{name}", source)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into {"a.b.c": value}; an empty mapping has no entries."""
    return dict(_walk(values, prefix))


def _walk(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn {"a.b.c": value} into nested dicts, the inverse of `flatten`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        level = result
        for parent in parents:
            level = level.setdefault(parent, {})
        level[leaf] = value
    return result


def accepts_text(key: str) -> bool:
    """Whether a free text is a valid value of the setting, so that `--data.path 2024` stays a text."""
    return FIELDS[key].annotation in (str, str | None)
