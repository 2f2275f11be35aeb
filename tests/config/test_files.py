"""The files that come with the project: every YAML loads and fits its stated worlds, every JSON builds."""

import re
from pathlib import Path

import pytest

from megadiff.config.deepspeed_json import build_deepspeed_config
from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "launch/configs").glob("dit_*.yaml"))
JSONS = sorted((ROOT / "ds_configs").glob("*.json"))
# file -> (ZeRO stage, precision)
STAGES = {
    "zero0": (0, "fp32"),
    "zero1": (1, "fp32"),
    "zero1_bf16": (1, "bf16"),
    "zero2_bf16": (2, "bf16"),
    "zero3_bf16": (3, "bf16"),
    "zero1_fp16": (1, "fp16"),
    "zero3_offload": (3, "bf16"),
}
PUBLISHED = {
    "dit_xl2_imagenet256": (256, 1e-4),
    "dit_xl2_imagenet512": (16, 3e-5),
    "dit_celebahq256": (64, 3e-5),
}
NODES_OF_8_A100 = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
}


def stated_worlds(path: Path) -> list[int]:
    stated = re.search(r"^# layouts: world ([0-9, ]+)", path.read_text(), re.MULTILINE)
    assert stated, f"{path.name} states no world sizes"
    return [int(number) for number in stated.group(1).split(",") if number.strip()]


def test_files_are_found() -> None:
    assert {path.stem for path in JSONS} == set(STAGES)
    assert {"dit_demo", "dit_demo_long", "dit_cifar10", *PUBLISHED} <= {path.stem for path in RUNS}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_run_fits_its_stated_worlds(path: Path) -> None:
    config = load_config(path)
    for world in stated_worlds(path):
        layout = resolve_layout(config, world)
        assert layout.world_size == world
        assert layout.global_batch_size == config.train.global_batch_size
        build_deepspeed_config(config, layout)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_c12_run_fits_8_gpus_in_3d(path: Path) -> None:
    config = load_config(path, {f"parallel.{name}": value for name, value in NODES_OF_8_A100.items()})
    layout = resolve_layout(config, 8)
    assert (layout.tensor, layout.pipeline, layout.data) == (2, 2, 2)
    assert layout.accumulation >= layout.pipeline


@pytest.mark.parametrize("name", PUBLISHED)
def test_c12_published_batch_and_rate_with_a_layout_for_8_gpus(name: str) -> None:
    config = load_config(ROOT / f"launch/configs/{name}.yaml")
    assert (config.train.global_batch_size, config.optimizer.lr) == PUBLISHED[name]
    assert {key: getattr(config.parallel, key) for key in NODES_OF_8_A100} == NODES_OF_8_A100
    assert 8 in stated_worlds(ROOT / f"launch/configs/{name}.yaml")


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_deepspeed_file_gives_its_stage_and_precision(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = load_config(None, None, path)
    assert (config.parallel.zero_stage, config.train.precision) == STAGES[path.stem]
    built = DeepSpeedConfig(build_deepspeed_config(config, resolve_layout(config, 1)))
    assert built.zero_optimization_stage == config.parallel.zero_stage
    assert built.bfloat16_config.enabled == (config.train.precision == "bf16")
    assert built.float16_config.enabled == (config.train.precision == "fp16")


def test_demo_runs_on_a_cpu() -> None:
    config = load_config(ROOT / "launch/configs/dit_demo.yaml")
    assert config.data.name == "emoji"
    assert config.train.precision == "fp32"
    assert config.parallel.zero_stage == 0
