"""B34: a misspelt key is an error at every level: file, command line, DeepSpeed JSON and its sections."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from megadiff.config.deepspeed_table import DEEPSPEED_KEYS, Entry, Refused
from megadiff.config.flags import ALIASES
from megadiff.config.keys import FIELDS, SECTIONS
from megadiff.config.load import config_from_dict, load_config, parse_command_line
from megadiff.config.yaml_text import dump_yaml
from megadiff.errors import ConfigError


def misspell(word: str) -> str:
    """Double a letter in the middle, which makes no other key."""
    middle = len(word) // 2
    return word[:middle] + word[middle] + word[middle:]


def deepspeed_paths(table: Mapping[str, Entry] = DEEPSPEED_KEYS, prefix: str = "") -> Iterator[str]:
    for name, entry in table.items():
        if isinstance(entry, dict):
            yield f"{prefix}{name}"
            yield from deepspeed_paths(entry, f"{prefix}{name}.")
        elif not isinstance(entry, Refused):
            yield f"{prefix}{name}"


@pytest.mark.parametrize("key", FIELDS)
def test_b34_misspelt_key_in_a_file_is_an_error_with_the_nearest_name(key: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml({section: {misspell(name): 1}}))
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {key}?")) as error:
        load_config(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("key", [*FIELDS, *(flag.removeprefix("--") for flag in ALIASES)])
def test_b34_misspelt_argument_is_an_error_with_the_nearest_name(key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"did you mean --{key}?")):
        parse_command_line([f"--{misspell(key)}", "1"])
    with pytest.raises(ConfigError, match="unknown argument"):
        parse_command_line([f"--{misspell(key)}=1"])


@pytest.mark.parametrize("section", [*SECTIONS, "deepspeed"])
def test_b34_misspelt_section_is_an_error(section: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{misspell(section)}:\n  a: 1\n")
    with pytest.raises(ConfigError, match=f"unknown key {misspell(section)}"):
        load_config(path)


@pytest.mark.parametrize("key", list(deepspeed_paths()))
def test_b34_misspelt_deepspeed_key_is_an_error_at_every_level(key: str, tmp_path: Path) -> None:
    *parents, name = key.split(".")
    content: dict[str, object] = {misspell(name): 1}
    for parent in reversed(parents):
        content = {parent: content}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=re.escape("unknown DeepSpeed key " + ".".join([*parents, misspell(name)]))):
        load_config(None, deepspeed_config=path)
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {name}?")):
        yaml = tmp_path / "run.yaml"
        yaml.write_text(dump_yaml({"deepspeed": content}))
        load_config(yaml)


def test_b34_key_of_another_section_is_pointed_to(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  lr: 1e-4\n")
    with pytest.raises(ConfigError, match=r"unknown key train\.lr .* did you mean optimizer\.lr\?"):
        load_config(path)


def test_b34_key_at_the_top_is_pointed_to_its_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-4\n")
    with pytest.raises(ConfigError, match=r"unknown key lr .* did you mean optimizer\.lr\?"):
        load_config(path)


def test_b34_unknown_key_in_overrides_and_in_a_stored_config_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"train\.sed"):
        load_config(None, {"train.sed": 1})
    for wrong in (
        {"seed": 1},
        {"train": 3},
        {"deepspeed": 3},
        {"deepspeed": {"zero_optimisation": {"stage": 1}}},
    ):
        with pytest.raises(ConfigError):
            load_config(None, wrong)
    with pytest.raises(ConfigError, match=r"train\.sed in the stored config"):
        config_from_dict({"train": {"sed": 1}})


def test_section_that_is_no_mapping_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: 3\n")
    with pytest.raises(ConfigError, match=r"train = 3 .* is not a section"):
        load_config(path)
