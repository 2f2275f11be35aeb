"""A run that stops and goes on is the same run: numbers, data, rates, counters, names and log."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megadiff.checkpoint import CheckpointReader
from megadiff.checkpoint.export import ExportSettings, export_weights
from megadiff.checkpoint.import_ import ImportSettings, import_weights
from tests.engine.runs import (
    RunReport,
    assert_same_tensors,
    checkpoint,
    checkpoints,
    counters,
    log_lines,
    log_steps,
    run,
    stored,
    tiny_config,
    train_well,
)
from tests.pool import WorkerPool

Pools = Mapping[int, WorkerPool]


def train_in_parts(pool: WorkerPool, run_dir: Path, stops: tuple[int, ...], **settings: Any) -> list[RunReport]:
    """Trains one run folder with a stop after each of some steps."""
    return [train_well(pool, tiny_config(train__stop_at_step=stop, **settings), run_dir, resume=None) for stop in stops]


def test_b17_weights_average_and_optimizer_go_on_bit_for_bit(pools: Pools, tmp_path: Path) -> None:
    train_in_parts(pools[1], tmp_path / "straight", (20,))
    train_in_parts(pools[1], tmp_path / "parts", (10, 20))
    assert_same_tensors(checkpoint(tmp_path / "parts", 20), checkpoint(tmp_path / "straight", 20))
    tensors, at_10 = stored(checkpoint(tmp_path / "parts", 20)), stored(checkpoint(tmp_path / "parts", 10))
    kinds = {name.partition("/")[0] for name in tensors}
    assert kinds == {"model", "ema", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
    for name, average in tensors.items():
        if name.startswith("ema/"):
            raw = "model/" + name.removeprefix("ema/")
            assert not torch.equal(average, tensors[raw]), f"{name} is a copy of the raw weights"
            assert not torch.equal(average, at_10[name]), f"{name} did not move after the resume"
    assert counters(checkpoint(tmp_path / "parts", 20)) == {
        "step": 20,
        "samples": 80,
        "optimizer_steps": 20,
        "skipped_steps": 0,
        "ema_updates": 20,
    }


def test_b17_a_checkpoint_without_average_is_refused_while_it_is_on(pools: Pools, tmp_path: Path) -> None:
    train_well(pools[1], tiny_config(train__stop_at_step=3, ema__enabled=False), tmp_path)
    report = run(pools[1], tiny_config(), tmp_path)
    assert report.error.startswith("CheckpointError")
    assert "holds no moving average" in report.error and "--ema.enabled false" in report.error
    assert log_steps(tmp_path) == [1, 2, 3], "a refused resume must not touch the log"
    report = train_well(pools[1], tiny_config(train__stop_at_step=5, ema__enabled=False), tmp_path)
    assert "resumed from" in report.output


def test_an_average_that_is_switched_off_is_told(pools: Pools, tmp_path: Path) -> None:
    train_well(pools[1], tiny_config(train__stop_at_step=3), tmp_path)
    report = train_well(pools[1], tiny_config(train__stop_at_step=5, ema__enabled=False), tmp_path)
    assert "ema.enabled: True -> False" in report.output


def test_b20_the_second_resume_counts_on(pools: Pools, tmp_path: Path) -> None:
    """30 steps as 30, 10 + 20 and 10 + 10 + 10, over the end of an epoch of 37 samples."""
    settings = {"train__steps": 30, "checkpoint__save_every_steps": 5, "data__num_samples": 37}
    plans = {"one": (30,), "two": (10, 30), "three": (10, 20, 30)}
    reports = {name: train_in_parts(pools[1], tmp_path / name, stops, **settings) for name, stops in plans.items()}
    seen = {name: [ids for report in parts for ids in report.sample_ids] for name, parts in reports.items()}
    entries = {name: [i for report in parts for i in report.indices] for name, parts in reports.items()}
    assert [len(report.sample_ids) for report in reports["three"]] == [10, 10, 10]
    assert sorted(i for ids in seen["one"] for i in ids) == list(range(120))
    names = [f"step_{step:08d}" for step in range(5, 31, 5)]
    for name in plans:
        assert seen[name] == seen["one"] and entries[name] == entries["one"]
        assert log_steps(tmp_path / name) == list(range(1, 31))
        assert checkpoints(tmp_path / name) == ["latest", *names]
        assert_same_tensors(checkpoint(tmp_path / name, 30), checkpoint(tmp_path / "one", 30))
    losses = {name: [line["loss"] for line in log_lines(tmp_path / name)] for name in plans}
    assert losses["one"] == losses["two"] == losses["three"]


def test_b20_a_finished_run_is_not_trained_further(pools: Pools, tmp_path: Path) -> None:
    train_well(pools[1], tiny_config(train__steps=10), tmp_path)
    before = stored(checkpoint(tmp_path, 10))
    report = train_well(pools[1], tiny_config(train__steps=10), tmp_path)
    assert report.sample_ids == [] and "nothing to do" in report.output
    assert checkpoints(tmp_path) == ["latest", "step_00000010"]
    assert all(torch.equal(value, before[name]) for name, value in stored(checkpoint(tmp_path, 10)).items())
    assert log_steps(tmp_path) == list(range(1, 11))


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_b18_the_rate_in_the_optimizer_equals_the_straight_run(pools: Pools, tmp_path: Path, zero_stage: int) -> None:
    """Rate and weight decay where the optimizer steps; 7 lies inside the warm-up of 8 steps, 13 after it."""
    settings = {"parallel__zero_stage": zero_stage}
    (straight,) = train_in_parts(pools[1], tmp_path / "straight", (20,), **settings)
    calls_a_step = len(straight.rates) // 20
    assert len(straight.rates) == 20 * calls_a_step and calls_a_step >= 1
    assert len({tuple(rates) for rates in straight.rates}) > 18, "the rate did not move"
    assert {decay for groups in straight.rates for _, decay in groups} == {0.0, 0.1}
    for stop in (7, 13):
        _, resumed = train_in_parts(pools[1], tmp_path / f"stop_{stop}", (stop, 20), **settings)
        assert resumed.rates == straight.rates[stop * calls_a_step :]


def test_b18_the_step_result_reports_the_rate_that_was_used(pools: Pools, tmp_path: Path) -> None:
    (report,) = train_in_parts(pools[1], tmp_path, (20,))
    assert [result[2] for result in report.results] == [groups[0][0] for groups in report.rates]


def test_stop_at_step_keeps_the_horizon(pools: Pools, tmp_path: Path) -> None:
    """The rates of a run that stops at 6 of 20 steps are those of 20 steps, and the last step is saved."""
    (short,) = train_in_parts(pools[1], tmp_path / "short", (6,))
    (full,) = train_in_parts(pools[1], tmp_path / "full", (20,))
    assert short.rates == full.rates[:6]
    assert checkpoints(tmp_path / "short") == ["latest", "step_00000006"]


@pytest.mark.parametrize("log_every_steps", [1, 10])
def test_a_crash_leaves_a_log_that_the_resume_repairs(pools: Pools, tmp_path: Path, log_every_steps: int) -> None:
    """The log holds every step of the checkpoint, also those that were still waiting for a log step."""
    settings = {"checkpoint__save_every_steps": 5, "monitor__log_every_steps": log_every_steps}
    config = tiny_config(**settings)
    crashed = run(pools[1], config, tmp_path / "run", crash_after=8)
    assert crashed.error.startswith("KeyboardInterrupt")
    with (tmp_path / "run" / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"step": 9, "lo')
    resumed = train_well(pools[1], config, tmp_path / "run")
    train_well(pools[1], config, tmp_path / "straight")
    assert resumed.sample_ids[0][0] == 5 * 4
    assert log_steps(tmp_path / "run") == list(range(1, 21))
    losses = [[line["loss"] for line in log_lines(tmp_path / name)] for name in ("run", "straight")]
    assert losses[0] == losses[1]
    assert_same_tensors(checkpoint(tmp_path / "run", 20), checkpoint(tmp_path / "straight", 20))


def test_another_run_folder_starts_from_a_checkpoint(pools: Pools, tmp_path: Path) -> None:
    """`--resume OTHER` leaves the other folder alone; the second start goes on from its own checkpoints."""
    train_well(pools[1], tiny_config(train__stop_at_step=5), tmp_path / "old")
    resume = str(tmp_path / "old")
    train_well(pools[1], tiny_config(train__stop_at_step=10), tmp_path / "new", resume=resume)
    report = train_well(pools[1], tiny_config(), tmp_path / "new", resume=resume)
    assert report.sample_ids[0][0] == 10 * 4
    assert checkpoints(tmp_path / "old") == ["latest", "step_00000005"]
    train_well(pools[1], tiny_config(), tmp_path / "straight")
    assert_same_tensors(checkpoint(tmp_path / "new", 20), checkpoint(tmp_path / "straight", 20))


def test_resume_latest_without_a_checkpoint_is_refused(pools: Pools, tmp_path: Path) -> None:
    report = run(pools[1], tiny_config(), tmp_path, resume="latest")
    assert report.error.startswith("CheckpointError: --resume found no checkpoint in")


@pytest.mark.parametrize(
    ("key", "value"),
    [("model__hidden_size", 32), ("diffusion__prediction", "eps"), ("data__num_samples", 64)],
)
def test_a_changed_network_diffusion_or_data_setting_is_refused(
    pools: Pools, tmp_path: Path, key: str, value: Any
) -> None:
    train_well(pools[1], tiny_config(train__stop_at_step=2), tmp_path)
    report = run(pools[1], tiny_config(**{key: value}), tmp_path)
    assert report.error.startswith("ConfigError: cannot resume")
    assert key.replace("__", ".") in report.error and str(value) in report.error
    assert checkpoints(tmp_path) == ["latest", "step_00000002"] and log_steps(tmp_path) == [1, 2]


def test_changed_data_under_the_same_settings_are_refused(pools: Pools, tmp_path: Path) -> None:
    """A folder of latents to which somebody added a file."""
    folder = tmp_path / "latents"
    folder.mkdir()
    write_latents(folder / "a.safetensors", 20)
    settings = {"data__name": "latents", "data__path": str(folder), "data__num_samples": 1024}
    train_well(pools[1], tiny_config(train__stop_at_step=3, **settings), tmp_path / "run")
    write_latents(folder / "b.safetensors", 10)
    report = run(pools[1], tiny_config(**settings), tmp_path / "run")
    assert report.error.startswith("CheckpointError") and "was trained on other data" in report.error


def write_latents(path: Path, count: int) -> None:
    """A file of latents and labels, as the latent data set reads it."""
    generator = torch.Generator().manual_seed(count)
    latents = torch.randn((count, 3, 4, 4), generator=generator)
    save_file({"latents": latents, "labels": torch.arange(count) % 5}, path)


def test_imported_weights_can_be_trained_further_on_any_data(pools: Pools, tmp_path: Path) -> None:
    """They carry no samples, so neither their data settings nor a fingerprint bind the new run."""
    train_well(pools[1], tiny_config(train__stop_at_step=3), tmp_path / "run")
    export_weights(checkpoint(tmp_path / "run", 3), tmp_path / "out", ExportSettings("native", weights="raw"))
    import_weights(tmp_path / "out", tmp_path / "new", ImportSettings("native"))
    config = tiny_config(train__stop_at_step=2, data__num_samples=21)
    report = train_well(pools[1], config, tmp_path / "new")
    assert report.sample_ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert counters(checkpoint(tmp_path / "new", 2))["ema_updates"] == 2
    with CheckpointReader(checkpoint(tmp_path / "new", 0)) as imported:
        start = imported.read("model", "blocks.0.attn.q.weight")
    trained = stored(checkpoint(tmp_path / "run", 3))["model/blocks.0.attn.q.weight"]
    assert torch.equal(start, trained)
    assert (start - stored(checkpoint(tmp_path / "new", 2))["model/blocks.0.attn.q.weight"]).abs().max() < 0.1


METHODS: dict[str, dict[str, Any]] = {
    "importance density, hybrid schedule": {"diffusion__importance": "density", "diffusion__schedule": "hybrid"},
    "importance weight, flow": {
        "diffusion__importance": "weight",
        "diffusion__schedule": "flow",
        "diffusion__prediction": "flow",
        "diffusion__timestep_sampling": "logit_normal",
        "diffusion__loss_weight": "min_snr",
    },
    "adaptive, pure noise at the end": {
        "diffusion__timestep_sampling": "adaptive",
        "diffusion__zero_terminal_snr": True,
        "diffusion__shift": 2.0,
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_learn_from_losses_go_on_bit_for_bit(pools: Pools, tmp_path: Path, method: str) -> None:
    """Refits after steps 4, 7, 10, ...; the stops lie before the first, between two, and right after one."""
    levels = {"num_levels": 10, "refit_from_step": 4, "refit_every_steps": 3}
    settings = {**{f"diffusion__{name}": value for name, value in levels.items()}, **METHODS[method]}
    train_in_parts(pools[1], tmp_path / "straight", (20,), **settings)
    expected = stored(checkpoint(tmp_path / "straight", 20))
    assert expected["levels/sums"].shape == (2, 10, 4) and float(expected["levels/sums"][0, :, 0].sum()) > 0
    for stop in (2, 9, 10):
        train_in_parts(pools[1], tmp_path / f"stop_{stop}", (stop, 20), **settings)
        assert_same_tensors(checkpoint(tmp_path / f"stop_{stop}", 20), checkpoint(tmp_path / "straight", 20))


def test_a_table_of_another_layout_goes_on(pools: Pools, tmp_path: Path) -> None:
    """The density is the same after a resume on two data ranks; a run without importance holds no table."""
    settings = {"diffusion__importance": "density", "diffusion__refit_from_step": 4, "diffusion__refit_every_steps": 3}
    train_in_parts(pools[1], tmp_path / "one", (12,), **settings)
    train_in_parts(pools[1], tmp_path / "both", (8,), **settings)
    train_in_parts(pools[2], tmp_path / "both", (12,), **settings)
    one, both = (stored(checkpoint(tmp_path / name, 12))["levels/sums"] for name in ("one", "both"))
    torch.testing.assert_close(both, one, rtol=1e-4, atol=1e-12)
