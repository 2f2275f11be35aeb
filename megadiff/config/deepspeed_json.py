"""The DeepSpeed JSON: strict reading, taking over what our own settings say too, and the dict for DeepSpeed.

After `take_over` each thing is said in one place only: `Config.deepspeed` keeps what is merely passed on.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megadiff.config.deepspeed_table import DEEPSPEED_KEYS, Entry, Fixed, Owned, Passed, Refused
from megadiff.config.keys import nearest, nest
from megadiff.config.layout import Layout
from megadiff.config.schema import Config
from megadiff.errors import ConfigError

# DeepSpeed prints a progress line every `steps_per_print` steps; the monitor of this project replaces it.
_NEVER = 10**12
_FP16_SCALING = {"initial_scale_power": 16, "loss_scale_window": 200, "hysteresis": 1}
# The pipeline engine fails with tensor parallelism unless all three are off (design.md section 5).
_PIPELINE = {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False}
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int, float),
    "float": (int, float),
    "text": (str,),
    "list": (list,),
}


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON; its content is checked by `check_deepspeed`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the DeepSpeed config {path}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"the DeepSpeed config {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the DeepSpeed config {path} holds a {type(values).__name__}; expected an object")
    return values


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"key {twice[0]!r} is given twice")
    return dict(pairs)


def check_deepspeed(values: Mapping[str, Any], source: str) -> None:
    """Refuse unknown, misspelt, unsupported and mistyped keys at every level.

    Args:
        values: content of the DeepSpeed JSON.
        source: where it was read, for the message.
    """
    for key, entry, value in _walk(values, DEEPSPEED_KEYS, "", source):
        if isinstance(entry, Refused):
            raise ConfigError(f"DeepSpeed key {key} in {source} is not supported: {entry.remedy}")
        if isinstance(entry, Fixed):
            if value not in (entry.value, "auto") or isinstance(value, int) != isinstance(value, bool):
                raise ConfigError(
                    f"DeepSpeed key {key} = {value!r} in {source} is set to {str(entry.value).lower()} by "
                    "megadiff "
                    f"({entry.reason}); remove it"
                )
        elif isinstance(entry, Passed):
            _check_value(key, entry, value, source)


def _walk(
    values: Mapping[str, Any], table: Mapping[str, Entry], prefix: str, source: str
) -> Iterator[tuple[str, Entry, Any]]:
    """Yield (dotted key, table entry, value) of every leaf."""
    for name, value in values.items():
        entry = table.get(name)
        if entry is None:
            raise _unknown(f"{prefix}{name}", str(name), table, source)
        if not isinstance(entry, dict):
            yield f"{prefix}{name}", entry, value
        elif isinstance(value, Mapping):
            yield from _walk(value, entry, f"{prefix}{name}.", source)
        else:
            raise ConfigError(
                f"DeepSpeed key {prefix}{name} = {value!r} in {source} is not an object; expected keys such "
                "as "
                f"{', '.join(list(entry)[:3])} in it"
            )


def _unknown(key: str, name: str, table: Mapping[str, Entry], source: str) -> ConfigError:
    usable = [known for known, entry in table.items() if not isinstance(entry, Refused)]
    hint = nearest(name, usable) or f"known here: {', '.join(usable)}"
    return ConfigError(f"unknown DeepSpeed key {key} in {source}; {hint}".strip())


def _check_value(key: str, entry: Passed, value: Any, source: str) -> None:
    wrong = not isinstance(value, _TYPES[entry.kind]) or (isinstance(value, bool) and entry.kind != "bool")
    wrong = wrong or (entry.kind in ("int", "float") and not math.isfinite(value))
    # DeepSpeed's own examples write 5e8 where an integer is meant.
    wrong = wrong or (entry.kind == "int" and value != int(value))
    wrong = wrong or (bool(entry.choices) and value not in entry.choices)
    wrong = wrong or (entry.kind in ("int", "float") and value < entry.minimum)
    if wrong:
        raise ConfigError(f"DeepSpeed key {key} = {value!r} in {source} is not accepted; expected {_expected(entry)}")


def _expected(entry: Passed) -> str:
    if entry.choices:
        return f"one of {', '.join(entry.choices)}"
    names = {"bool": "true or false", "text": "a text", "list": "a list"}
    return names.get(entry.kind) or f"{'an integer' if entry.kind == 'int' else 'a number'} >= {entry.minimum}"


def take_over(
    values: Mapping[str, Any], source: str, given: Mapping[str, Any], given_in: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a checked DeepSpeed JSON into our settings and the rest that is passed on.

    Args:
        values: content of the JSON, checked by `check_deepspeed`.
        source: where it was read.
        given: dotted settings that the user wrote elsewhere.
        given_in: for each of them, where.

    Returns:
        (dotted settings that the JSON sets, content to pass on to DeepSpeed).

    Raises:
        ConfigError: a setting has different values in both places.
    """
    settings: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    for key, entry, value in _walk(values, DEEPSPEED_KEYS, "", source):
        if isinstance(entry, Passed):
            passed[key] = int(value) if entry.kind == "int" else value
        elif isinstance(entry, Owned) and entry.setting != "train.precision" and value != "auto":
            _refuse_conflict(entry.setting, value, key, source, given, given_in)
            settings[entry.setting] = value
    settings |= _precision(values, source, given, given_in)
    return settings, nest(_without_inert(passed, values))


def _refuse_conflict(
    setting: str, value: Any, key: str, source: str, given: Mapping[str, Any], given_in: Mapping[str, str]
) -> None:
    ours = given.get(setting)
    if ours is not None and ours != value:
        raise ConfigError(
            f"{setting} = {ours} in {given_in[setting]} contradicts {key} = {json.dumps(value)} in {source}; "
            "make them equal or remove one"
        )


def _precision(
    values: Mapping[str, Any], source: str, given: Mapping[str, Any], given_in: Mapping[str, str]
) -> dict[str, Any]:
    """Translate `bf16.enabled` and `fp16.enabled` to `train.precision`."""
    flags = {name: values[name]["enabled"] for name in ("bf16", "fp16") if "enabled" in values.get(name, {})}
    for name, flag in flags.items():
        if flag not in (True, False, "auto") or isinstance(flag, int) != isinstance(flag, bool):
            raise ConfigError(f"DeepSpeed key {name}.enabled = {flag!r} in {source}; expected true, false or auto")
    chosen = [name for name, flag in flags.items() if flag is True]
    if len(chosen) > 1:
        raise ConfigError(f"bf16.enabled and fp16.enabled are both true in {source}; enable one of them")
    ours = given.get("train.precision")
    for name in flags:
        if ours is not None and flags[name] != "auto" and flags[name] != (ours == name):
            _refuse_conflict("train.precision", flags[name], f"{name}.enabled", source, given, given_in)
    return {"train.precision": chosen[0]} if chosen else {}


def _without_inert(passed: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what stands in a section that is switched off, such as the scaling under `fp16.enabled: false`."""
    zero = values.get("zero_optimization", {})
    off = [f"{name}." for name in ("bf16", "fp16") if values.get(name, {}).get("enabled") is False]
    for name in ("offload_param", "offload_optimizer"):
        if zero.get(name, {}).get("device") == "none":
            off.append(f"zero_optimization.{name}.")
    return {key: value for key, value in passed.items() if not key.startswith(tuple(off))}


def check_effect(config: Config) -> None:
    """Refuse DeepSpeed keys that have no effect at this ZeRO stage, precision or layout."""
    stage = config.parallel.zero_stage or 0
    for key, entry, value in _walk(config.deepspeed, DEEPSPEED_KEYS, "", "the DeepSpeed config"):
        if isinstance(entry, Passed) and stage not in entry.stages:
            stages = " or ".join(map(str, entry.stages))
            raise ConfigError(
                f"DeepSpeed key {key} = {value!r} has no effect at parallel.zero_stage = {stage}; remove it "
                "or use "
                f"stage {stages}"
            )
        if key.startswith(("bf16.", "fp16.")) and config.train.precision != key[:4]:
            raise ConfigError(
                f"DeepSpeed key {key} = {value!r} has no effect with train.precision = "
                f"{config.train.precision}; "
                f"remove it or use train.precision = {key[:4]}"
            )
    zero = config.deepspeed.get("zero_optimization", {})
    for name in ("offload_param", "offload_optimizer"):
        if name in zero and "device" not in zero[name]:
            raise ConfigError(f"DeepSpeed key zero_optimization.{name} has no effect without device; add device: cpu")
    _refuse_linear_in_place(config)
    if zero.get("overlap_comm") and config.parallel.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "DeepSpeed key zero_optimization.overlap_comm = true has no effect with "
            "pipeline_model_parallel_size = "
            f"{config.parallel.pipeline_model_parallel_size}; remove it or use 1 stage"
        )


def _refuse_linear_in_place(config: Config) -> None:
    """Refuse ZeRO-3's own linear layer where selective checkpointing keeps the outputs of matrix products.

    `LinearFunctionForZeroStage3` adds the bias to the product in place, so the kept product holds the bias already and
    the recomputation adds it again: wrong gradients (15 % in a trial) without any message.
    """
    zero = config.deepspeed.get("zero_optimization", {})
    if zero.get("memory_efficient_linear") and config.train.activation_checkpointing == "selective":
        raise ConfigError(
            "DeepSpeed key zero_optimization.memory_efficient_linear = true gives wrong gradients with "
            "train.activation_checkpointing = selective; remove it or use train.activation_checkpointing = full"
        )


def build_deepspeed_config(config: Config, layout: Layout) -> dict[str, Any]:
    """Build the complete dict for `deepspeed.initialize(config=...)`; DeepSpeed derives nothing itself.

    `gradient_clipping` is 0 at ZeRO 0 (which has no half precision): the engine clips there by itself, because
    DeepSpeed's norm is wrong on pipelines (design.md section 5).
    """
    precision = config.train.precision
    half = precision in ("bf16", "fp16")
    result = copy.deepcopy(config.deepspeed)
    result.setdefault("steps_per_print", _NEVER)
    result |= {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.accumulation,
        "gradient_clipping": config.optimizer.clip_norm if layout.zero_stage >= 1 else 0.0,
        "zero_allow_untested_optimizer": True,
    }
    result["zero_optimization"] = {**result.get("zero_optimization", {}), "stage": layout.zero_stage}
    if half:
        defaults = _FP16_SCALING if precision == "fp16" else {}
        result[precision] = {**defaults, **result.get(precision, {}), "enabled": True}
    if precision == "bf16":  # eight bits of mantissa lose small gradients when many micro-batches are added up
        result["data_types"] = {"grad_accum_dtype": "fp32", **result.get("data_types", {})}
    if layout.zero_stage == 3 and config.train.activation_checkpointing == "selective":
        result["zero_optimization"]["memory_efficient_linear"] = False  # see _refuse_linear_in_place
    if "offload_optimizer" in result["zero_optimization"]:
        result["zero_force_ds_cpu_optimizer"] = False
    if layout.pipeline > 1:
        result["pipeline"] = dict(_PIPELINE)
    return result
