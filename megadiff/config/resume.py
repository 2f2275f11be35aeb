"""What may change between the run that wrote a checkpoint and the run that continues it."""

from collections.abc import Mapping
from typing import Any

from megadiff.config.keys import FIELDS, flatten
from megadiff.config.schema import Config
from megadiff.errors import ConfigError

# A change here makes another network or other training pairs.
_FIXED_SECTIONS = ("model", "diffusion", "data")
# ... except these: the preset's name says nothing that its values do not, files may have moved (the data's content is
# compared by fingerprint), and prefetching has no influence on the numbers.
_FREE = frozenset({"model.preset", "data.path", "data.prefetch_batches", "diffusion.vgg_path", "diffusion.vae_path"})
# The layout, on any of which a checkpoint continues, is not worth a line; nor is a name whose values are told.
_SILENT = frozenset(
    {"train.micro_batch_size", "train.gradient_accumulation_steps", "data.prefetch_batches", "optimizer.preset"}
)
_SILENT_SECTIONS = ("parallel",)
_NOT_SET = "not set"


def check_resume(old: Mapping[str, Any], new: Config) -> list[str]:
    """Compare the config that a checkpoint holds with that of the run which continues it.

    The stored config supplies no values.

    Args:
        old: the resolved config of the checkpoint (`config_to_dict`).
        new: the config of this run.

    Returns:
        One line a difference that is allowed and worth telling.

    Raises:
        ConfigError: a network, diffusion or data setting differs.
    """
    before, now = _comparable(old), _comparable(new.model_dump(mode="json"))
    changed = [key for key in sorted(before.keys() | now.keys()) if _value(before, key) != _value(now, key)]
    fixed = [key for key in changed if key.partition(".")[0] in _FIXED_SECTIONS and key not in _FREE]
    if fixed:
        shown = "; ".join(f"{key} was {_value(before, key)} and is {_value(now, key)}" for key in fixed)
        raise ConfigError(f"cannot resume: {shown}; set the old value or start a new --run-dir")
    told = [key for key in changed if key not in _SILENT and key.partition(".")[0] not in _SILENT_SECTIONS]
    return [f"{key}: {_value(before, key)} -> {_value(now, key)}" for key in told]


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    flat = flatten(values)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat.items()}


def _value(values: Mapping[str, Any], key: str) -> Any:
    """Return a setting; one that is younger than the checkpoint had its default then."""
    if key in values:
        return values[key]
    default = FIELDS[key].default if key in FIELDS else _NOT_SET
    return list(default) if isinstance(default, tuple) else default
