"""The files that come with the project: every YAML loads and fits its stated worlds, every JSON builds."""

import re
from pathlib import Path
from typing import Any

import pytest

from megadiff.config.deepspeed_json import build_deepspeed_config
from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config
from megadiff.errors import ConfigError

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "launch/configs").glob("*.yaml"))
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
UNETS = {"unet_demo", "unet_cifar10", "unet_imagenet256", "sd2_512", "sdxl_1024"}
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
    assert {"dit_demo", "dit_demo_long", "dit_cifar10", *PUBLISHED, *UNETS} == {path.stem for path in RUNS}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_run_fits_its_stated_worlds(path: Path) -> None:
    config = load_config(path)
    for world in stated_worlds(path):
        layout = resolve_layout(config, world)
        assert layout.world_size == world
        assert layout.global_batch_size == config.train.global_batch_size
        build_deepspeed_config(config, layout)


def node_of_8(path: Path) -> dict[str, Any]:
    """The layout in 3D, as far as the network has it."""
    model = load_config(path).model
    if path.stem == "sd2_512":  # 5 heads at the finest level
        return {"parallel.tensor_model_parallel_size": 1, "parallel.pipeline_model_parallel_size": 4}
    node = {f"parallel.{name}": value for name, value in NODES_OF_8_A100.items()}
    return node | {"parallel.sequence_parallel": model.name == "dit" or model.condition == "text"}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_c12_run_fits_8_gpus_in_3d(path: Path) -> None:
    degrees = node_of_8(path)
    layout = resolve_layout(load_config(path, degrees), 8)
    assert (layout.tensor, layout.pipeline) == tuple(degrees.values())[:2]
    assert layout.data == 2
    assert layout.folded == (path.stem in UNETS)
    assert layout.accumulation >= layout.pipeline * (1 + layout.folded)


def test_c12_sdxl_fits_a_pipeline_of_8() -> None:
    config = load_config(ROOT / "launch/configs/sdxl_1024.yaml", {"parallel.pipeline_model_parallel_size": 8})
    layout = resolve_layout(config, 8)
    assert layout.folded and layout.accumulation >= 16


def test_sd2_names_the_tensor_degrees_that_its_heads_allow() -> None:
    with pytest.raises(ConfigError, match=r"= 2 does not divide the 5, 10 or 20 heads .* use 1 or 5$"):
        load_config(ROOT / "launch/configs/sd2_512.yaml", {"parallel.tensor_model_parallel_size": 2})


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


@pytest.mark.parametrize("name", ["dit_demo", "unet_demo"])
def test_demo_runs_on_a_cpu(name: str) -> None:
    config = load_config(ROOT / f"launch/configs/{name}.yaml")
    assert config.data.name == "emoji"
    assert config.train.precision == "fp32"
    assert config.parallel.zero_stage == 0
