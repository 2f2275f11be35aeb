"""The command line of a training run: every dotted key, Megatron's names for some of them, and a few own flags."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from megadiff.config.deepspeed_table import DEEPSPEED_KEYS, Entry, Owned, Passed, Refused
from megadiff.config.keys import FIELDS, SECTIONS, accepts_text, nearest, nearest_key
from megadiff.config.yaml_text import parse_value
from megadiff.errors import ConfigError

LATEST = "latest"
_LEAVES = frozenset(key.rpartition(".")[2] for key in FIELDS)


@dataclass(frozen=True)
class Alias:
    """Another name for a dotted key. With `constant` it is a flag without a value."""

    key: str
    constant: Any = None


# Megatron-LM's and Megatron-DeepSpeed's names.
ALIASES: dict[str, Alias] = {
    "--tensor-model-parallel-size": Alias("parallel.tensor_model_parallel_size"),
    "--pipeline-model-parallel-size": Alias("parallel.pipeline_model_parallel_size"),
    "--sequence-parallel": Alias("parallel.sequence_parallel", True),
    "--pipeline-schedule": Alias("parallel.pipeline_schedule"),
    "--zero-stage": Alias("parallel.zero_stage"),
    "--num-layers": Alias("model.num_layers"),
    "--hidden-size": Alias("model.hidden_size"),
    "--num-attention-heads": Alias("model.num_heads"),
    "--patch-size": Alias("model.patch_size"),
    "--num-classes": Alias("model.num_classes"),
    "--hidden-dropout": Alias("model.dropout"),
    "--attention-dropout": Alias("model.attention_dropout"),
    "--qk-layernorm": Alias("model.qk_norm", True),
    "--global-batch-size": Alias("train.global_batch_size"),
    "--micro-batch-size": Alias("train.micro_batch_size"),
    "--train-iters": Alias("train.steps"),
    "--seed": Alias("train.seed"),
    "--bf16": Alias("train.precision", "bf16"),
    "--fp16": Alias("train.precision", "fp16"),
    "--recompute-granularity": Alias("train.activation_checkpointing"),
    "--kernels": Alias("train.kernels"),
    "--lr": Alias("optimizer.lr"),
    "--lr-decay-style": Alias("optimizer.lr_schedule"),
    "--lr-warmup-iters": Alias("optimizer.warmup_steps"),
    "--weight-decay": Alias("optimizer.weight_decay"),
    "--adam-eps": Alias("optimizer.eps"),
    "--clip-grad": Alias("optimizer.clip_norm"),
    "--data-path": Alias("data.path"),
    "--save-interval": Alias("checkpoint.save_every_steps"),
    "--log-interval": Alias("monitor.log_every_steps"),
    # Ours, for what is often set by hand.
    "--evaluate-every-steps": Alias("monitor.evaluate_every_steps"),
}


@dataclass(frozen=True)
class CommandLine:
    """What was written on the command line, before any file is read."""

    config: Path | None
    deepspeed_config: Path | None
    run_dir: Path | None
    resume: str | None
    dry_run: bool
    settings: dict[str, Any]
    flags: dict[str, str]


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line as a ConfigError, like every other bad setting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


class _Set(argparse.Action):
    """Collects (flag, key, value) in the order of the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else values
        namespace.settings.append((option_string or self.option_strings[0], self.dest, value))


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read the arguments (without the program's name) into typed values.

    Raises:
        ConfigError: an unknown flag, a missing value, or two flags that set one key to different values.
        SystemExit: after `--help`.
    """
    parser = build_parser()
    known, unknown = parser.parse_known_args(list(argv), argparse.Namespace(settings=[]))
    if unknown:
        raise _unknown_argument(unknown[0], parser)
    settings, flags = _collect(known.settings)
    return CommandLine(
        config=known.config,
        deepspeed_config=known.deepspeed_config,
        run_dir=known.run_dir,
        resume=known.resume,
        dry_run=known.dry_run,
        settings=settings,
        flags=flags,
    )


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> ConfigError:
    if not argument.startswith("-"):
        return ConfigError(f"unexpected argument {argument!r}; settings are written as --section.key value")
    name = argument.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    key = name.lstrip("-")
    if key.startswith("deepspeed."):
        _check_single_deepspeed_key(key.removeprefix("deepspeed."), name)
    dotted = "." in key and not key.startswith("deepspeed.")
    hint = nearest_key(key, "--") if dotted or key in _LEAVES else nearest(name, known)
    return ConfigError(f"unknown argument {name}; {hint.strip() or 'see --help for all keys'}")


def _check_single_deepspeed_key(key: str, argument: str) -> None:
    """Refuse a DeepSpeed key that is not passed on, with our setting or the reason from the table."""
    entry: Entry | None = DEEPSPEED_KEYS
    for part in key.split("."):
        entry = entry.get(part) if isinstance(entry, dict) else None
    if isinstance(entry, Owned):
        raise ConfigError(f"argument {argument} is another name of a setting; use --{entry.setting}")
    if isinstance(entry, Refused):
        raise ConfigError(f"argument {argument} is not supported: {entry.remedy}")


def _collect(given: list[tuple[str, str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge the flags: the last value of a flag counts, and two different flags must not disagree."""
    settings: dict[str, Any] = {}
    flags: dict[str, str] = {}
    for flag, key, raw in given:
        value = _convert(flag, key, raw) if isinstance(raw, str) else raw
        if key in settings and flags[key] != flag and settings[key] != value:
            raise ConfigError(
                f"{flags[key]} sets {key} = {settings[key]} and {flag} sets it to {value}; give one of them"
            )
        settings[key], flags[key] = value, flag
    return settings, flags


def _convert(flag: str, key: str, raw: str) -> Any:
    try:
        value = parse_value(raw)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    is_text = key in FIELDS and accepts_text(key)
    return raw if is_text and value is not None and not isinstance(value, str) else value


def build_parser() -> argparse.ArgumentParser:
    """Build the parser, whose help lists all keys with their defaults in groups."""
    parser = _Parser(
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Settings: command line over --config over model.preset over defaults.",
        epilog="Values are YAML: 1e-4, true, null, [a, b]. The DeepSpeed JSON must not contradict them.",
    )
    _add_run_flags(parser)
    _add_aliases(parser)
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(section, " ".join((kind.__doc__ or "").split()))
        for name in kind.model_fields:
            _add_key(group, f"{section}.{name}")
    _add_deepspeed_keys(parser)
    return parser


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--config", type=Path, metavar="FILE", default=None, help="YAML with sections as below")
    add(
        "--deepspeed_config",
        "--deepspeed-config",
        type=Path,
        metavar="FILE",
        default=None,
        help="DeepSpeed JSON",
    )
    add("--run-dir", type=Path, metavar="DIR", default=None, help="where config, log and checkpoints go")
    add(
        "--resume",
        nargs="?",
        const=LATEST,
        default=None,
        metavar="PATH",
        help="run folder or checkpoint to continue from; without PATH the latest of --run-dir",
    )
    add(
        "--dry-run",
        action="store_true",
        default=False,
        help="print the resolved config and the layout, then exit",
    )
    # The deepspeed launcher passes --local_rank, and scripts pass --deepspeed out of habit.
    add("--local_rank", "--local-rank", type=int, dest="ignored_rank", default=None, help=argparse.SUPPRESS)
    add("--deepspeed", action="store_true", dest="ignored_deepspeed", default=False, help=argparse.SUPPRESS)


def _add_aliases(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other names")
    for flag, alias in ALIASES.items():
        if alias.constant is None:
            group.add_argument(flag, action=_Set, dest=alias.key, metavar="V", help=f"= --{alias.key}")
        else:
            text = f"= --{alias.key} {json.dumps(alias.constant)}"
            group.add_argument(flag, action=_Set, nargs=0, dest=alias.key, const=alias.constant, help=text)


def _add_key(group: argparse._ArgumentGroup, key: str) -> None:
    field = FIELDS[key]
    shown = json.dumps(field.default).replace("%", "%%")
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, (str, int))]
    text = f"{' | '.join(choices)}; default {shown}" if choices else f"default {shown}"
    if field.annotation is bool:
        group.add_argument(f"--{key}", action=_Set, dest=key, nargs="?", const=True, metavar="BOOL", help=text)
    else:
        group.add_argument(f"--{key}", action=_Set, dest=key, metavar="V", help=text)


def _add_deepspeed_keys(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("deepspeed", "Single keys of the DeepSpeed JSON, over --deepspeed_config.")
    for key in _passed_keys(DEEPSPEED_KEYS, "deepspeed."):
        group.add_argument(f"--{key}", action=_Set, dest=key, metavar="V", help="passed on to DeepSpeed")


def _passed_keys(table: Mapping[str, Entry], prefix: str) -> Iterator[str]:
    for name, entry in table.items():
        if isinstance(entry, dict):
            yield from _passed_keys(entry, f"{prefix}{name}.")
        elif isinstance(entry, Passed):
            yield f"{prefix}{name}"
