"""What `--dry-run` prints."""

import re
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
import yaml

from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.engine.dry_run import describe, readable_bytes, table
from megadiff.engine.optimizer import count_parameters
from megadiff.models import chain_builders, meta_chain
from megadiff.models.chain import Chain

ROOT = Path(__file__).resolve().parents[2]


def large_config() -> Config:
    settings = {
        "model.preset": "DiT-XL/2",
        "train.precision": "bf16",
        "train.global_batch_size": 256,
        "train.micro_batch_size": 8,
        "data.name": "latents",
        "data.path": "latents",
        "parallel.tensor_model_parallel_size": 2,
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "parallel.zero_stage": 1,
    }
    return load_config(None, settings)


def test_it_names_every_factor_and_every_stage() -> None:
    config = large_config()
    text = describe(config, resolve_layout(config, 16))
    assert "16 processes = 2 tensor x 2 pipeline x 4 data, ZeRO 1, sequence parallel" in text
    assert "256 samples = 8 micro-batch x 8 accumulation x 4 data" in text
    network = count_parameters(Chain(chain_builders(config.model)))
    assert f"{network:,} in the whole network" in text
    assert "embed ... blocks.13" in text and "blocks.14 ... head" in text
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "send", "recv"):
        assert kind in text


def test_it_begins_with_the_settings_as_yaml() -> None:
    config = large_config()
    first = describe(config, resolve_layout(config, 16)).split("\n\n")[0]
    assert Config(**yaml.safe_load(first.replace("deepspeed: {}", ""))).parallel == config.parallel


def test_it_needs_no_process_group_and_describes_one_process() -> None:
    config = Config()
    text = describe(config, resolve_layout(config, 1))
    assert not dist.is_initialized()
    assert "none" in text.splitlines()[-1]


def test_a_large_unet_is_described_without_being_allocated() -> None:
    """The 2.6 billion parameters of SDXL's UNet would take 10 GB."""
    config = load_config(ROOT / "launch/configs/sdxl_1024.yaml", {"parallel.pipeline_model_parallel_size": 8})
    describe(large_config(), resolve_layout(large_config(), 16))  # what is imported and cached once
    before = psutil.Process().memory_info().rss
    text = describe(config, resolve_layout(config, 8))
    assert psutil.Process().memory_info().rss - before < 1e9
    lines = [line.split() for line in text.splitlines()]
    stages = [line for line in lines if len(line) > 6 and line[0].isdigit()]
    assert [(int(line[0]), int(line[1])) for line in stages] == [(s, min(s, 15 - s)) for s in range(16)]
    assert "folded (this run)" in text and "1f1b" in text
    network = count_parameters(meta_chain(config.model))
    assert f"{network:,} in the whole network" in text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (1_048_000, "1023 KiB")],
)
def test_readable_bytes(size: int, text: str) -> None:
    assert readable_bytes(size) == text


def test_stages_of_progressive_training_are_listed_with_what_they_save() -> None:
    config = load_config(ROOT / "launch/configs/dit_demo.yaml", {"train.progressive": True})
    lines = describe(config, resolve_layout(config, 1)).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("training stage"))
    rows = [line.split() for line in lines[start + 1 : start + 4]]
    assert [(row[1], row[3], row[4]) for row in rows] == [("0", "450", "4"), ("450", "720", "8"), ("720", "900", "16")]
    found = re.search(r"mean over the steps .*, (-\d+)% against the last stage", lines[start + 4])
    assert found is not None and int(found[1]) <= -40


def test_columns_line_up() -> None:
    lines = table([("name", "size"), ("a", "5"), ("longer", "1,000")]).splitlines()
    assert lines == ["name     size", "a           5", "longer  1,000"]
