"""Command line, file, preset and defaults: precedence, types, and what goes into the run folder."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megadiff.config.flags import ALIASES
from megadiff.config.keys import FIELDS
from megadiff.config.load import config_from_dict, config_to_dict, load_config, parse_command_line, to_yaml
from megadiff.config.schema import Config
from megadiff.errors import ConfigError

LATENTS = {"data.name": "latents", "data.path": "/latents"}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_empty_command_line_gives_the_defaults() -> None:
    call = parse_command_line([])
    assert call.config == Config().model_copy(update={"parallel": call.config.parallel})
    assert call.config.parallel.zero_stage == 0
    assert (call.run_dir, call.resume, call.dry_run) == (None, None, False)


def test_command_line_wins_over_file_over_preset_over_default(tmp_path: Path) -> None:
    text = "model: {preset: DiT-B/4, num_heads: 6}\ndata: {name: ids}\ntrain: {seed: 5, steps: 700}\n"
    path = write(tmp_path / "run.yaml", text)
    config = parse_command_line(["--config", str(path), "--train.seed", "9"]).config
    assert config.train.seed == 9
    assert config.train.steps == 700
    assert config.model.num_heads == 6
    assert config.model.hidden_size == 768
    assert config.model.patch_size == 4
    assert config.optimizer.lr == 1e-4


@pytest.mark.parametrize("form", [["--optimizer.lr", "3e-4"], ["--optimizer.lr=3e-4"], ["--lr", "3e-4"], ["--lr=3e-4"]])
def test_forms_of_an_override(form: list[str]) -> None:
    assert parse_command_line(form).config.optimizer.lr == 3e-4


def test_values_of_all_kinds() -> None:
    arguments = [
        "--optimizer.betas",
        "[0.9, 0.95]",
        "--data.classes=[cats,dogs]",
        "--train.stop_at_step",
        "null",
    ]
    arguments += [
        "--model.qk_norm",
        "--ema.enabled",
        "false",
        "--parallel.zero_stage",
        "1",
        "--data.path",
        "2024",
    ]
    arguments += ["--parallel.partition", "[2,3,3]", "--pipeline-model-parallel-size", "3"]
    config = parse_command_line(arguments).config
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.data.classes == ("cats", "dogs")
    assert config.train.stop_at_step is None
    assert config.model.qk_norm is True
    assert config.ema.enabled is False
    assert config.parallel.zero_stage == 1
    assert config.data.path == "2024"
    assert config.parallel.partition == (2, 3, 3)


def test_levels_of_a_unet_are_lists_on_the_command_line() -> None:
    arguments = ["--model.name", "unet", "--model.block_out_channels", "[32, 64, 96]"]
    model = parse_command_line([*arguments, "--model.transformer_layers_per_block=[0,1,0]"]).config.model
    assert model.block_out_channels == (32, 64, 96)
    assert model.transformer_layers_per_block == (0, 1, 0)


def test_megatron_names_reach_their_keys() -> None:
    arguments = [
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "2",
        "--sequence-parallel",
        "--bf16",
    ]
    arguments += [
        "--pipeline-schedule",
        "1f1b",
        "--num-layers",
        "4",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "2",
    ]
    arguments += [
        "--global-batch-size",
        "32",
        "--micro-batch-size",
        "4",
        "--train-iters",
        "500",
        "--lr",
        "2e-4",
        "--seed",
        "3",
    ]
    arguments += ["--recompute-granularity", "selective", "--zero-stage", "1"]
    config = parse_command_line(arguments).config
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.parallel.pipeline_model_parallel_size == 2
    assert config.parallel.sequence_parallel is True
    assert config.parallel.pipeline_schedule == "1f1b"
    assert config.parallel.zero_stage == 1
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_heads) == (4, 64, 2)
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (32, 4)
    assert (config.train.steps, config.train.seed, config.train.precision) == (500, 3, "bf16")
    assert config.train.activation_checkpointing == "selective"
    assert config.optimizer.lr == 2e-4


def test_own_short_names_reach_their_keys() -> None:
    assert parse_command_line(["--evaluate-every-steps", "50"]).config.monitor.evaluate_every_steps == 50


def test_every_alias_names_an_existing_key() -> None:
    assert {alias.key for alias in ALIASES.values()} <= FIELDS.keys()


@pytest.mark.parametrize("rank", [["--local_rank=3"], ["--local_rank", "3"], ["--local-rank=3"]])
def test_launcher_arguments_are_accepted_before_other_flags(rank: list[str]) -> None:
    assert parse_command_line([*rank, "--deepspeed", "--train.seed", "4"]).config.train.seed == 4


def test_run_flags() -> None:
    call = parse_command_line(["--run-dir", "runs/a", "--resume", "--dry-run"])
    assert (call.run_dir, call.resume, call.dry_run) == (Path("runs/a"), "latest", True)
    assert parse_command_line(["--resume", "runs/b"]).resume == "runs/b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--optimizer.lr", "fast"],
            r"optimizer\.lr = 'fast' in --optimizer\.lr is not accepted; expected a valid number",
        ),
        (["--lr", "fast"], r"optimizer\.lr = 'fast' in --lr"),
        (["--train.steps", "1.5"], r"train\.steps = 1\.5 .* integer"),
        (["--train.steps", "true"], r"train\.steps = True .* integer"),
        (["--train.steps", "0"], r"train\.steps = 0 .* greater than 0"),
        (["--optimizer.lr", "true"], r"optimizer\.lr = True"),
        (["--optimizer.lr", ".nan"], r"optimizer\.lr = nan"),
        (["--optimizer.lr", ".inf"], r"optimizer\.lr = inf"),
        (["--optimizer.betas", "[0.9]"], r"optimizer\.betas .* too short"),
        (["--optimizer.betas", "0.9"], r"optimizer\.betas = 0\.9 .* a list such as \[0\.9, 0\.999\]"),
        (["--model.block_out_channels", "64"], r"model\.block_out_channels = 64 .* a list such as \[64, 128\]"),
        (["--model.block_out_channels", "[64, 0]"], r"model\.block_out_channels\[1\] = 0 .* greater than 0"),
        (["--model.block_out_channels", "[]"], r"model\.block_out_channels = .*at least 1 item"),
        (["--parallel.zero_stage", "true"], r"parallel\.zero_stage = True .* integer"),
        (["--parallel.zero_stage", "4"], r"parallel\.zero_stage = 4 .* 0, 1, 2 or 3"),
        (["--model.time_freq_shift", "false"], r"model\.time_freq_shift = False .* integer"),
        (["--parallel.sequence_parallel", "1"], r"parallel\.sequence_parallel = 1 .* boolean"),
        (["--data.classes", "cat"], r"data\.classes = 'cat' .* expected a list$"),
        (["--diffusion.schedule", "cosin"], r"diffusion\.schedule = 'cosin' .*did you mean cosine\? expected"),
        (["--data.classes", "[1, 2]"], r"data\.classes\[0\] = 1 .* string"),
        (["--optimizer.lr"], "expected one argument"),
        (["--bf16", "--fp16"], "--bf16 sets train.precision = bf16 and --fp16 sets it to fp16"),
        (["--lr", "1e-4", "--optimizer.lr", "2e-4"], "give one of them"),
        (["--deepspeed.zero_optimization.stage", "1"], r"use --parallel\.zero_stage"),
        (["--deepspeed.optimizer", "1"], r"not supported: use optimizer\.name"),
        (["--deepspeed.zero_optimization.overlap_com", "1"], r"did you mean .*overlap_comm\?"),
        (["train"], "unexpected argument 'train'"),
        (["--data.classes", "[a"], "--data.classes: .* not a YAML value"),
        (["--model.preset", "DiT-XL/3"], r"did you mean DiT-XL/\d"),
    ],
)
def test_wrong_value_is_one_sentence_with_key_value_and_expectation(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_command_line(arguments)
    assert "\n" not in str(error.value)


def test_the_last_of_equal_flags_counts() -> None:
    assert parse_command_line(["--train.seed", "1", "--train.seed", "2"]).config.train.seed == 2


def test_commented_out_section_says_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "train:\n  # seed: 1\nmodel:\n  num_layers: 3\n")
    assert load_config(path).model.num_layers == 3


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("DiT-S/8", (384, 12, 6)),
        ("DiT-B/2", (768, 12, 12)),
        ("DiT-L/4", (1024, 24, 16)),
        ("DiT-XL/2", (1152, 28, 16)),
    ],
)
def test_published_widths(name: str, widths: tuple[int, int, int]) -> None:
    model = load_config(None, {"model.preset": name, **LATENTS}).model
    assert (model.hidden_size, model.num_layers, model.num_heads) == widths
    assert (model.input_size, model.in_channels, model.num_classes, model.learn_sigma) == (32, 4, 1000, False)
    assert model.patch_size == int(name[-1])


def test_preset_on_the_command_line_is_not_undone_by_the_file(tmp_path: Path) -> None:
    stored = to_yaml(load_config(None, {"model.preset": "DiT-XL/2", **LATENTS}))
    path = write(tmp_path / "run.yaml", stored)
    with pytest.raises(ConfigError, match=r"model\.hidden_size = 1152 .* would undo --model\.preset DiT-B/2"):
        load_config(path, {"model.preset": "DiT-B/2"})


@pytest.mark.parametrize(
    ("stored", "chosen", "message"),
    [
        ("dit-tiny-test", "unet-tiny-test", r"model\.name = dit .* which has unet"),
        ("unet-small-cpu", "unet-tiny-test", r"model\.block_out_channels = \[48, 96\] .* which has \[16, 32\]"),
        ("unet-cifar", "unet-256", r"model\.block_out_channels = \[128, 256, 256, 256\]"),
    ],
)
def test_preset_of_a_unet_is_not_undone_by_the_file(stored: str, chosen: str, message: str, tmp_path: Path) -> None:
    written = to_yaml(load_config(None, {"model.preset": stored, "data.name": "ids"}))
    path = write(tmp_path / "run.yaml", written)
    with pytest.raises(ConfigError, match=rf"{message}.*; remove it from the file or give"):
        load_config(path, {"model.preset": chosen})
    assert load_config(path, {"model.preset": stored}) == load_config(path)


def test_size_that_a_preset_leaves_at_its_default_is_not_undone(tmp_path: Path) -> None:
    text = "model: {layers_per_block: 3}\ndata: {name: ids}\n"
    path = write(tmp_path / "run.yaml", text)
    with pytest.raises(ConfigError, match=r"layers_per_block = 3 .* would undo --model\.preset sd2, which has 2"):
        load_config(path, {"model.preset": "sd2"})


def rich_config() -> Config:
    overrides = {
        "model.preset": "DiT-B/4",
        "train.precision": "bf16",
        "optimizer.lr": 1e-05,
        "optimizer.betas": [0.9, 0.99],
        "data.classes": ["yes", "1e-4", "null", "Zoë", "a: b", "#c"],
        "parallel.zero_stage": 2,
        "deepspeed.zero_optimization.overlap_comm": True,
        "deepspeed.zero_optimization.reduce_bucket_size": 5e8,
    }
    return load_config(None, overrides | LATENTS)


@pytest.mark.parametrize("config", [load_config(None), rich_config()], ids=["defaults", "rich"])
def test_resolved_config_round_trips_exactly(config: Config, tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", to_yaml(config))
    again = load_config(path)
    assert again == config
    assert to_yaml(again) == to_yaml(config)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_resolved_config_has_every_key() -> None:
    values = config_to_dict(load_config(None))
    assert {f"{s}.{n}" for s, content in values.items() if s != "deepspeed" for n in content} == set(FIELDS)


def test_help_lists_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_command_line(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    missing = [key for key in FIELDS if f"--{key} " not in text]
    assert not missing
    assert all(f"{flag} " in text for flag in ALIASES)
    assert "cosine | constant" in text
    assert "default 0.0001" in text


def test_config_error_comes_in_under_a_second_without_torch() -> None:
    code = (
        "import sys\n"
        "from megadiff.config.load import parse_command_line\n"
        "from megadiff.errors import ConfigError\n"
        "parse_command_line([])\n"
        "try:\n"
        "    parse_command_line(['--train.sed', '1'])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "heavy = {'torch', 'deepspeed', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert "did you mean --train.seed?" in result.stdout
    # Processor time, which other tests that run beside this one do not lengthen.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("fp64", 0), ("bf16", 1), ("fp16", 1)])
def test_the_default_stage_has_masters_for_half_precision(precision: str, stage: int) -> None:
    assert load_config(None, {"train.precision": precision}).parallel.zero_stage == stage
