"""Progressive training through the real trainer: sizes, batches, rates, resumes in any stage, every layout alike."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megadiff.checkpoint import CheckpointReader
from megadiff.models.dit import sincos_positions
from tests.engine.runs import assert_same_tensors, checkpoint, counters, log_lines, log_steps, tiny_config, train_well
from tests.pool import WorkerPool

Pools = Mapping[int, WorkerPool]
STAGES = [
    {"until": 0.5, "input_size": 2, "global_batch_size": 8},
    {"until": 0.8, "input_size": 4, "lr_ratio": 0.5},
    {"until": 1.0, "input_size": 8, "shift": 2.0},
]
SETTINGS: dict[str, Any] = {
    "model__input_size": 8,
    "train__progressive": True,
    "train__stages": STAGES,
    "optimizer__lr_schedule": "constant",
    "optimizer__warmup_steps": 0,
    "diffusion__importance": "density",
    "diffusion__refit_from_step": 4,
}


def test_c9_every_stage_trains_as_it_says(pools: Pools, tmp_path: Path) -> None:
    report = train_well(pools[1], tiny_config(monitor__sample_every_steps=5, **SETTINGS), tmp_path)
    assert log_steps(tmp_path) == list(range(1, 21))
    assert [len(ids) for ids in report.sample_ids] == [8] * 10 + [4] * 10
    assert [line["lr"] for line in log_lines(tmp_path)] == [1e-2] * 10 + [5e-3] * 6 + [1e-2] * 4
    seen = [i for ids in report.sample_ids for i in ids]
    assert seen == list(range(120)), "the stream goes on where the stage before left it"
    assert counters(checkpoint(tmp_path, 20))["samples"] == 120
    for number, (size, end) in enumerate(((2, 10), (4, 16), (8, 20)), start=1):
        assert f"stage {number}: {size} pixels" in report.output
        with CheckpointReader(checkpoint(tmp_path, end)) as reader:
            assert reader.config().model.input_size == size


@pytest.mark.parametrize("stops", [(3, 20), (10, 20), (12, 17, 20)], ids=str)
def test_a_checkpoint_in_any_stage_goes_on_bit_for_bit(pools: Pools, tmp_path: Path, stops: tuple[int, ...]) -> None:
    train_well(pools[1], tiny_config(**SETTINGS), tmp_path / "straight")
    for stop in stops:
        train_well(pools[1], tiny_config(train__stop_at_step=stop, **SETTINGS), tmp_path / "parts")
    assert_same_tensors(checkpoint(tmp_path / "parts", 20), checkpoint(tmp_path / "straight", 20))
    losses = [[line["loss"] for line in log_lines(tmp_path / name)] for name in ("straight", "parts")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {"parallel__pipeline_model_parallel_size": 2}),
        (2, {"parallel__zero_stage": 1}),
        (4, {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}),
    ],
    ids=["pp2", "zero1", "dp2 x tp2+sp"],
)
def test_stages_are_the_same_on_every_layout(
    pools: Pools, tmp_path: Path, world_size: int, settings: dict[str, Any]
) -> None:
    # The smallest size has one token, which sequence parallelism cannot share.
    plain = {**SETTINGS, "train__stages": [{**STAGES[0], "input_size": 4}, *STAGES[1:]]}
    train_well(pools[1], tiny_config(**plain), tmp_path / "one")
    train_well(pools[world_size], tiny_config(**plain, **settings), tmp_path / "many")
    one, many = ([line["loss"] for line in log_lines(tmp_path / name)] for name in ("one", "many"))
    assert many == pytest.approx(one, rel=1e-4)


def test_a_run_that_stops_early_does_not_enter_later_stages(pools: Pools, tmp_path: Path) -> None:
    report = train_well(pools[1], tiny_config(train__stop_at_step=3, **SETTINGS), tmp_path)
    assert "stage 1:" in report.output and "stage 3:" not in report.output and "nothing to do" not in report.output
    again = train_well(pools[1], tiny_config(train__stop_at_step=3, **SETTINGS), tmp_path)
    assert "nothing to do" in again.output and again.sample_ids == []


def test_a_unet_is_trained_in_stages(pools: Pools, tmp_path: Path) -> None:
    unet = {
        "model__name": "unet",
        "model__patch_size": 2,
        "model__hidden_size": 128,
        "model__num_layers": 6,
        "model__num_heads": 4,
        "model__mlp_ratio": 4.0,
        "model__block_out_channels": [8, 16],
        "model__layers_per_block": 1,
        "model__norm_num_groups": 4,
        "model__attention_head_dim": 8,
    }
    train_well(pools[1], tiny_config(**SETTINGS, **unet), tmp_path)
    assert log_steps(tmp_path) == list(range(1, 21))


def test_positions_of_a_smaller_size_lie_in_the_middle_of_what_they_stand_for() -> None:
    """A token that covers two by two has, to second order, the mean of their four encodings at low frequencies."""
    fine, coarse = sincos_positions(64, 8), sincos_positions(64, 4, spacing=2.0)
    means = fine.view(4, 2, 4, 2, 64).mean((1, 3)).view(16, 64)
    slow = [column for column in range(64) if column % 16 >= 6]
    torch.testing.assert_close(coarse[:, slow], means[:, slow], rtol=0, atol=2e-3)
    assert torch.equal(sincos_positions(64, 8, spacing=1.0), fine)
