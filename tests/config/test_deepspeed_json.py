"""The DeepSpeed JSON: strict keys, one place for each setting, and a dict that DeepSpeed accepts."""

import copy
import json
from collections.abc import Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any

import pytest

from megadiff.config.deepspeed_json import build_deepspeed_config
from megadiff.config.deepspeed_table import DEEPSPEED_KEYS, Entry, Owned, Passed, Refused
from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config, parse_command_line
from megadiff.config.yaml_text import dump_yaml
from megadiff.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_json(content: object) -> Path:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(content))
        return path

    return write_json


def leaves(table: Mapping[str, Entry] = DEEPSPEED_KEYS, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    for name, entry in table.items():
        if isinstance(entry, dict):
            yield from leaves(entry, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry


def nested(key: str, value: object) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


LEAVES = dict(leaves())
REFUSED = [key for key, entry in LEAVES.items() if isinstance(entry, Refused)]
PASSED = {key: entry for key, entry in LEAVES.items() if isinstance(entry, Passed)}
OWNED = {key: entry.setting for key, entry in LEAVES.items() if isinstance(entry, Owned)}
# DeepSpeed key -> (our setting, our value that agrees, one that does not, the value in the JSON).
TWICE = {
    "train_batch_size": ("train.global_batch_size", 32, 16, 32),
    "train_micro_batch_size_per_gpu": ("train.micro_batch_size", 4, 8, 4),
    "gradient_accumulation_steps": ("train.gradient_accumulation_steps", 4, 2, 4),
    "gradient_clipping": ("optimizer.clip_norm", 0.5, 1.0, 0.5),
    "zero_optimization.stage": ("parallel.zero_stage", 2, 1, 2),
    "bf16.enabled": ("train.precision", "bf16", "fp32", True),
    "fp16.enabled": ("train.precision", "fp16", "bf16", True),
}


def passed_value(entry: Passed) -> object:
    values = {"bool": True, "int": 7, "float": 2.0, "list": ["all_reduce"]}
    return entry.choices[-1] if entry.choices else values[entry.kind]


def context_of(key: str, entry: Passed) -> dict[str, Any]:
    """Return the settings under which a passed key has an effect."""
    settings: dict[str, Any] = {"parallel.zero_stage": entry.stages[-1]}
    if key.startswith(("bf16.", "fp16.")):
        settings["train.precision"] = key[:4]
    if ".offload_" in key and not key.endswith(".device"):
        settings[f"deepspeed.{key.rpartition('.')[0]}.device"] = "cpu"
    return settings


@pytest.mark.parametrize("key", REFUSED)
def test_b34_key_that_is_not_honoured_is_refused_with_a_remedy(key: str, write: Any) -> None:
    with pytest.raises(ConfigError, match=f"DeepSpeed key {key} .* is not supported: "):
        load_config(None, deepspeed_config=write(nested(key, {"enabled": True})))


@pytest.mark.parametrize("key", PASSED)
def test_b34_passed_key_reaches_deepspeed_from_json_yaml_and_command_line(key: str, write: Any, tmp_path: Path) -> None:
    entry = PASSED[key]
    value, settings = passed_value(entry), context_of(key, entry)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(dump_yaml({"deepspeed": nested(key, value)}))
    for config in (
        load_config(None, settings, write(nested(key, value))),
        load_config(yaml, settings),
        load_config(None, {**settings, f"deepspeed.{key}": value}),
    ):
        result: Any = build_deepspeed_config(config, resolve_layout(config, 1))
        for part in key.split("."):
            result = result[part]
        assert result == value


@pytest.mark.parametrize("key", PASSED)
def test_passed_key_with_a_wrong_type_or_auto_is_an_error(key: str, write: Any) -> None:
    settings = context_of(key, PASSED[key])
    for wrong in ({}, None, "auto", -1, 1.5 if PASSED[key].kind == "int" else []):
        if PASSED[key].kind == "list" and wrong == []:
            continue
        with pytest.raises(ConfigError, match=f"DeepSpeed key {key} "):
            load_config(None, settings, write(nested(key, wrong)))


@pytest.mark.parametrize("key", [key for key, entry in PASSED.items() if 0 not in entry.stages])
def test_b34_key_without_effect_at_the_stage_is_refused(key: str, write: Any) -> None:
    content = nested(key, passed_value(PASSED[key]))
    if ".offload_" in key:
        content["zero_optimization"][key.split(".")[1]]["device"] = "cpu"
    with pytest.raises(ConfigError, match=r"has no effect at parallel\.zero_stage = 0; remove it or use stage "):
        load_config(None, {"parallel.zero_stage": 0}, write(content))


def test_b34_scaling_of_another_precision_is_refused_unless_switched_off(write: Any) -> None:
    with pytest.raises(ConfigError, match=r"fp16\.loss_scale = 2\.0 has no effect with train\.precision = bf16"):
        load_config(None, {"train.precision": "bf16"}, write({"fp16": {"loss_scale": 2.0}}))
    config = load_config(None, {}, write({"fp16": {"enabled": False, "loss_scale": 2.0}, "bf16": {"enabled": True}}))
    assert config.train.precision == "bf16"
    assert config.deepspeed == {}


def test_b34_overlap_under_a_pipeline_is_refused(write: Any) -> None:
    path = write({"zero_optimization": {"stage": 1, "overlap_comm": True}})
    with pytest.raises(ConfigError, match=r"overlap_comm .* pipeline_model_parallel_size = 2"):
        load_config(None, {"parallel.pipeline_model_parallel_size": 2}, path)


def test_linear_layers_that_add_in_place_are_refused_under_selective_checkpointing(write: Any) -> None:
    path = write({"zero_optimization": {"stage": 3, "memory_efficient_linear": True}})
    with pytest.raises(ConfigError, match=r"memory_efficient_linear = true gives wrong gradients"):
        load_config(None, {"train.activation_checkpointing": "selective"}, path)
    for recompute in ("none", "full"):
        load_config(None, {"train.activation_checkpointing": recompute}, path)


def test_b34_offload_without_device_is_refused_and_device_none_says_nothing(write: Any) -> None:
    content = {"zero_optimization": {"stage": 1, "offload_optimizer": {"pin_memory": True}}}
    with pytest.raises(ConfigError, match="offload_optimizer has no effect without device"):
        load_config(None, None, write(content))
    content = {"zero_optimization": {"stage": 1, "offload_optimizer": {"pin_memory": True, "device": "none"}}}
    assert load_config(None, None, write(content)).deepspeed == {}


def test_every_owned_key_has_a_case() -> None:
    assert {key: case[0] for key, case in TWICE.items()} == OWNED


@pytest.mark.parametrize("key", TWICE)
def test_key_that_only_the_json_sets_is_taken_over(key: str, write: Any) -> None:
    setting, agreeing, _, value = TWICE[key]
    config = load_config(None, None, write(nested(key, value)))
    section, _, name = setting.partition(".")
    assert getattr(getattr(config, section), name) == agreeing
    assert config.deepspeed == {}


@pytest.mark.parametrize("key", TWICE)
def test_key_set_differently_in_both_places_is_an_error_that_names_both(key: str, write: Any, tmp_path: Path) -> None:
    setting, agreeing, other, value = TWICE[key]
    path = write(nested(key, value))
    yaml = tmp_path / "run.yaml"
    yaml.write_text(dump_yaml(nested(setting, other)))
    with pytest.raises(ConfigError) as error:
        load_config(yaml, None, path)
    for part in (setting, str(other), str(yaml), key, json.dumps(value), str(path)):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match=f"in --{setting} contradicts {key}"):
        load_config(None, {setting: other}, path)
    load_config(yaml, {setting: agreeing}, path)


@pytest.mark.parametrize("key", TWICE)
def test_b34_auto_is_resolved_from_our_setting(key: str, write: Any) -> None:
    setting, agreeing, _, value = TWICE[key]
    config = load_config(None, {setting: agreeing}, write(nested(key, "auto")))
    result: Any = build_deepspeed_config(config, resolve_layout(config, 1))
    assert "auto" not in json.dumps(result)
    if setting == "train.micro_batch_size":
        assert result["gradient_accumulation_steps"] == 64 // 4
    for part in key.split("."):
        result = result[part]
    assert result == (0.0 if key == "gradient_clipping" else value)


def test_disabled_precision_contradicts_only_itself(write: Any) -> None:
    path = write({"bf16": {"enabled": False}})
    assert load_config(None, {"train.precision": "fp64"}, path).train.precision == "fp64"
    with pytest.raises(ConfigError, match=r"train\.precision = bf16 .* contradicts bf16\.enabled = false"):
        load_config(None, {"train.precision": "bf16"}, path)
    with pytest.raises(ConfigError, match="both true"):
        load_config(None, None, write({"bf16": {"enabled": True}, "fp16": {"enabled": True}}))


def test_json_and_yaml_section_must_not_disagree_and_single_keys_win(write: Any, tmp_path: Path) -> None:
    yaml = tmp_path / "run.yaml"
    yaml.write_text(dump_yaml({"deepspeed": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 10}}}))
    path = write({"zero_optimization": {"stage": 1, "reduce_bucket_size": 20}})
    with pytest.raises(ConfigError, match=r"reduce_bucket_size = 10 .* contradicts .* = 20"):
        load_config(yaml, None, path)
    call = parse_command_line(
        ["--deepspeed-config", str(path), "--deepspeed.zero_optimization.reduce_bucket_size", "3e3"]
    )
    assert call.config.deepspeed == {"zero_optimization": {"reduce_bucket_size": 3000}}
    assert call.config.parallel.zero_stage == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list"),
        ('{"fp16": {}, "fp16": {}}', "'fp16' is given twice"),
        ('{"zero_optimization": true}', "zero_optimization = True .* is not an object"),
        ('{"bf16": {"enabled": 1}}', r"bf16\.enabled = 1"),
        ('{"zero_optimization": {"stage": true}}', r"parallel\.zero_stage = True"),
        ('{"steps_per_print": Infinity}', r"steps_per_print = inf"),
        ('{"fp16": {"loss_scale": NaN}}', r"fp16\.loss_scale = nan"),
        ('{"train_batch_size": 1.5}', r"train\.global_batch_size = 1\.5"),
        ('{"zero_allow_untested_optimizer": false}', "is set to true by megadiff"),
        ('{"zero_allow_untested_optimizer": 1}', "is set to true by megadiff"),
    ],
)
def test_bad_json_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(None, None, path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_missing_json_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the DeepSpeed config .*no\.json"):
        load_config(None, None, tmp_path / "no.json")


def test_loss_scale_starts_as_the_project_says() -> None:
    config = load_config(None, {"train.precision": "fp16"})
    built = build_deepspeed_config(config, resolve_layout(config, 1))
    assert built["fp16"] == {
        "enabled": True,
        "initial_scale_power": 16,
        "loss_scale_window": 200,
        "hysteresis": 1,
    }
    assert "bf16" not in built
    config = load_config(None, {"train.precision": "fp16", "deepspeed.fp16.hysteresis": 2})
    assert build_deepspeed_config(config, resolve_layout(config, 1))["fp16"]["hysteresis"] == 2


@pytest.mark.parametrize(
    ("precision", "stage", "clip"),
    [
        ("fp32", 0, 0.0),
        ("fp64", 0, 0.0),
        ("fp32", 1, 0.7),
        ("fp32", 3, 0.7),
        ("bf16", 1, 0.7),
        ("fp16", 2, 0.7),
    ],
)
def test_deepspeed_clips_except_at_stage_0(precision: str, stage: int, clip: float) -> None:
    settings = {"train.precision": precision, "parallel.zero_stage": stage, "optimizer.clip_norm": 0.7}
    config = load_config(None, settings)
    assert build_deepspeed_config(config, resolve_layout(config, 1))["gradient_clipping"] == clip


def test_pipeline_settings_are_there_only_with_stages() -> None:
    config = load_config(None, {"parallel.pipeline_model_parallel_size": 2})
    built = build_deepspeed_config(config, resolve_layout(config, 2))
    assert built["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False}
    assert "pipeline" not in build_deepspeed_config(load_config(None), resolve_layout(load_config(None), 2))


def test_building_does_not_change_the_config() -> None:
    settings = {"deepspeed.comms_logger.verbose": True, "deepspeed.zero_optimization.reduce_bucket_size": 5}
    config = load_config(None, {"parallel.zero_stage": 1, **settings})
    before = copy.deepcopy(config.deepspeed)
    built = build_deepspeed_config(config, resolve_layout(config, 1))
    built["zero_optimization"]["reduce_bucket_size"] = 6
    built["comms_logger"]["verbose"] = False
    assert config.deepspeed == before


def test_built_dict_is_complete() -> None:
    settings = {
        "parallel.zero_stage": 1,
        "train.precision": "bf16",
        "parallel.pipeline_model_parallel_size": 2,
    }
    config = load_config(None, {**settings, "deepspeed.zero_optimization.offload_optimizer.device": "cpu"})
    built = build_deepspeed_config(config, resolve_layout(config, 4))
    assert built.pop("steps_per_print") > 10**9
    assert built == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False},
    }


def test_stages_of_the_table() -> None:
    for key, entry in PASSED.items():
        if key.startswith(("zero_optimization.stage3_", "zero_optimization.offload_param.")):
            assert entry.stages == (3,), key
        elif key.startswith("zero_optimization."):
            assert 0 not in entry.stages, key
        else:
            assert entry.stages == (0, 1, 2, 3), key


def test_setting_that_is_null_in_the_yaml_is_taken_from_the_json(write: Any, tmp_path: Path) -> None:
    yaml = tmp_path / "run.yaml"
    yaml.write_text("train: {micro_batch_size: null}\n")
    assert load_config(yaml, None, write({"train_micro_batch_size_per_gpu": 8})).train.micro_batch_size == 8


class ReadKeys(dict[str, Any]):
    """A dict that notes the keys which are asked for."""

    def __init__(self, values: Mapping[str, Any], seen: set[str]) -> None:
        super().__init__(values)
        self.seen = seen

    def __copy__(self) -> "ReadKeys":
        return ReadKeys(self, self.seen)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def keys(self) -> KeysView[str]:
        return KeysView(self)


def test_table_knows_every_top_level_key_that_deepspeed_reads() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: set[str] = set()
    DeepSpeedConfig(ReadKeys({"train_batch_size": 1}, seen))  # type: ignore[arg-type]
    assert {"zero_optimization", "bf16", "optimizer", "wall_clock_breakdown"} <= seen
    assert not seen - DEEPSPEED_KEYS.keys()


def test_table_equals_the_fields_of_deepspeeds_own_models() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config

    models: dict[str, Any] = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
    }
    for path, model in models.items():
        table: Any = DEEPSPEED_KEYS
        for part in path.split("."):
            table = table[part]
        fields = model.model_fields
        names = set(fields) | {field.alias for field in fields.values() if field.alias}
        assert set(table) == names, path


@pytest.mark.parametrize("key", PASSED)
def test_deepspeed_accepts_every_passed_key(key: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    entry = PASSED[key]
    config = load_config(None, {**context_of(key, entry), f"deepspeed.{key}": passed_value(entry)})
    DeepSpeedConfig(build_deepspeed_config(config, resolve_layout(config, 1)))
