"""From files and command line to one checked `Config`. Precedence: command line, --config, preset,
defaults."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megadiff.config.checks import shown
from megadiff.config.deepspeed_json import check_deepspeed, check_effect, read_deepspeed_json, take_over
from megadiff.config.flags import CommandLine, read_command_line
from megadiff.config.keys import FIELDS, check_names, flatten, nearest, nest
from megadiff.config.presets import PRESETS, preset_values
from megadiff.config.schema import Config, ProgressiveStage
from megadiff.config.validate import validate
from megadiff.config.yaml_text import dump_yaml, read_yaml
from megadiff.errors import ConfigError

_COMMAND_LINE = "the command line"
# The fields that name a network size: a preset on the command line must not be undone by them in the file.
_SIZE_FIELDS = {
    "dit": ("hidden_size", "num_layers", "num_heads", "patch_size"),
    "unet": (
        "block_out_channels",
        "layers_per_block",
        "transformer_layers_per_block",
        "mid_block_transformer_layers",
        "attention_head_dim",
        "cross_attention_dim",
        "pooled_dim",
    ),
}


@dataclass(frozen=True)
class Invocation:
    """A parsed command line.

    Attributes:
        config: the complete settings.
        run_dir: where config, log and checkpoints go.
        resume: a run folder or checkpoint to continue from, "latest" for the newest of `run_dir`, or None.
        dry_run: only print the config and the layout.
    """

    config: Config
    run_dir: Path | None
    resume: str | None
    dry_run: bool


@dataclass(frozen=True)
class _Given:
    """Dotted settings as the user wrote them, and for each the file or flag it stands in."""

    values: dict[str, Any]
    sources: dict[str, str]


def parse_command_line(argv: Sequence[str]) -> Invocation:
    """Parse the arguments of a training script (without the program's name).

    Raises:
        ConfigError: anything about the settings is wrong.
        SystemExit: after `--help`.
    """
    line = read_command_line(argv)
    return Invocation(_build(line), line.run_dir, line.resume, line.dry_run)


def load_config(
    path: Path | None, overrides: Mapping[str, Any] | None = None, deepspeed_config: Path | None = None
) -> Config:
    """Load a YAML config.

    Args:
        path: the YAML file, or None for defaults.
        overrides: dotted keys (or nested mappings) and their values, as on a command line.
        deepspeed_config: a DeepSpeed JSON.
    """
    settings = flatten(overrides or {})
    flags = {key: f"--{key}" for key in settings}
    return _build(CommandLine(path, deepspeed_config, None, None, False, settings, flags))


def config_from_dict(values: Mapping[str, Any], source: str = "the stored config") -> Config:
    """Rebuild a Config from `config_to_dict`, for example from a checkpoint's index.json."""
    check_names(values, source)
    flat = {section: dict(content) for section, content in values.items()}
    return _complete(flat, {}, source)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Return all settings as plain values (JSON and YAML know them); `config_from_dict` is the inverse."""
    return config.model_dump(mode="json")


def to_yaml(config: Config) -> str:
    """Write all settings as YAML; loading the text gives an equal Config."""
    return dump_yaml(config_to_dict(config))


def _build(line: CommandLine) -> Config:
    from_file = _read_sections(line.config) if line.config else {}
    file_name = str(line.config) if line.config else "--config"
    check_names(from_file, file_name)
    check_names(nest(line.settings), _COMMAND_LINE)
    json_content, json_name = _deepspeed_content(line, from_file, file_name)
    given = _merge(from_file, file_name, line)
    _refuse_undone_presets(given, line)
    check_deepspeed(json_content, json_name)
    settings, passed = take_over(json_content, json_name, given.values, given.sources)
    sources = given.sources | {key: json_name for key in settings}
    values = given.values | settings
    return _complete({**nest(values), "deepspeed": passed}, sources, file_name)


def _read_sections(path: Path) -> dict[str, Any]:
    """Read a YAML config; a section whose keys are all commented out reads as null and says nothing."""
    return {section: content for section, content in read_yaml(path).items() if content is not None}


def _deepspeed_content(line: CommandLine, from_file: dict[str, Any], file_name: str) -> tuple[dict[str, Any], str]:
    """Merge the `deepspeed` section, the JSON file and single keys of the command line, and name the "
    "source."""
    section = from_file.get("deepspeed", {})
    check_deepspeed(section, f"{file_name} (deepspeed)")
    name = str(line.deepspeed_config) if line.deepspeed_config else f"{file_name} (deepspeed)"
    content = read_deepspeed_json(line.deepspeed_config) if line.deepspeed_config else {}
    check_deepspeed(content, name)
    ours, theirs = flatten(section), flatten(content)
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            raise ConfigError(
                f"{key} = {ours[key]} in {file_name} (deepspeed) contradicts {key} = {theirs[key]} in "
                f"{name}; "
                "make them equal or remove one"
            )
    single = {key.removeprefix("deepspeed."): v for key, v in line.settings.items() if key.startswith("deepspeed.")}
    check_deepspeed(nest(single), _COMMAND_LINE)
    return nest(ours | theirs | single), name


def _merge(from_file: dict[str, Any], file_name: str, line: CommandLine) -> _Given:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for section, content in from_file.items():
        if section != "deepspeed":
            values |= {f"{section}.{name}": value for name, value in content.items()}
    sources |= dict.fromkeys(values, file_name)
    for key, value in line.settings.items():
        if not key.startswith("deepspeed."):
            values[key], sources[key] = value, line.flags[key]
    return _Given(values, sources)


def _refuse_undone_presets(given: _Given, line: CommandLine) -> None:
    """Refuse `--model.preset X` where the file writes other values than X's out: explicit keys win over a preset."""
    for section in PRESETS:
        chosen = f"{section}.preset"
        if line.settings.get(chosen) is None:
            continue
        preset = preset_values(line.settings[chosen], section)
        fields = ("name", *_SIZE_FIELDS[preset["name"]]) if section == "model" else tuple(preset)
        for name in fields:
            key = f"{section}.{name}"
            value, expected = given.values.get(key), shown(preset.get(name, FIELDS[key].default))
            if key in given.values and key not in line.settings and value != expected:
                raise ConfigError(
                    f"{key} = {value} in {given.sources[key]} would undo {line.flags[chosen]} "
                    f"{line.settings[chosen]}, which has {expected}; remove it from the file or give --{key}"
                )


def _complete(values: dict[str, Any], sources: Mapping[str, str], source: str) -> Config:
    """Expand the presets, resolve the ZeRO stage, check types and the rules between settings."""
    values = {**values, **{section: _expanded(section, values.get(section, {})) for section in PRESETS}}
    parallel = values.get("parallel", {})
    if parallel.get("zero_stage") is None:
        # Half precision needs the float32 masters of a sharded optimizer; stage 1 costs nothing on one rank.
        half = values.get("train", {}).get("precision") in ("bf16", "fp16")
        values = {**values, "parallel": {**parallel, "zero_stage": int(half)}}
    try:
        config = Config(**values)
    except ValidationError as error:
        first = min(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")  # a typo explains the rest
        raise _type_error(first, sources, source) from error
    check_deepspeed(config.deepspeed, source)
    validate(config)
    check_effect(config)
    return config


def _expanded(section: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a section with those of its preset, if it names one."""
    if given.get("preset") is None:
        return dict(given)
    preset = dict(preset_values(given["preset"], section))
    if "warmup_steps" in given:  # says the same in another unit
        preset.pop("warmup_epochs", None)
    return preset | dict(given)


def _type_error(detail: ErrorDetails, sources: Mapping[str, str], source: str) -> ConfigError:
    """Turn the first of pydantic's errors into a sentence with key, value, source and what is expected."""
    key = ".".join(str(part) for part in detail["loc"][:2])
    index = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _inside(detail["loc"][2:]))
    expected = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    expected = expected.removeprefix("expected ")
    if detail["type"] == "extra_forbidden":
        hint = nearest(str(detail["loc"][-1]), ProgressiveStage.model_fields)
        return ConfigError(f"unknown key {key}{index} in {sources.get(key, source)}; {hint or 'see --help'}".strip())
    if detail["type"] == "missing":
        lack = "lacks a key" if isinstance(detail["loc"][-1], str) else "is too short"
        return ConfigError(f"{key} in {sources.get(key, source)} {lack}; expected a value at {index}")
    if detail["type"] == "tuple_type":
        example = FIELDS[key].default
        expected = f"a list such as {shown(example)}" if example else "a list"
    misspelt = detail["type"] == "literal_error" and isinstance(detail["input"], str)
    hint = nearest(detail["input"], re.findall(r"'(\w+)'", expected)) if misspelt else ""
    return ConfigError(
        f"{key}{index} = {detail['input']!r} in {sources.get(key, source)} is not accepted; {hint}expected {expected}"
    )


def _inside(loc: Sequence[str | int]) -> Sequence[str | int]:
    """Where in a list a value stands; other words are the names of pydantic's own alternatives."""
    return loc if loc and isinstance(loc[0], int) else [part for part in loc if isinstance(part, int)]
