"""A run with kernels and one without them: the same losses, and the log says which it was."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from megadiff.config.schema import Config
from tests.engine.runs import changed, log_lines, run, tiny_config, train_well
from tests.pool import WorkerPool

IN_USE = "kernels: cpu ada_layer_norm, gated_residual, diffuse, weighted_mse, solver_step"


def kernel_config(kernels: str, **more: object) -> Config:
    return changed(tiny_config(), {"train.kernels": kernels, **more})


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in log_lines(run_dir)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_kernels_change_the_losses_by_rounding_only(
    pools: Mapping[int, WorkerPool], tmp_path: Path, world_size: int
) -> None:
    reports = {
        mode: train_well(pools[world_size], kernel_config(mode), tmp_path / mode)
        for mode in ("required", "auto", "off")
    }
    assert IN_USE in reports["auto"].output and IN_USE in reports["required"].output
    assert "kernels: off, PyTorch references of ada_layer_norm, gated_residual, diffuse" in reports["off"].output
    with_kernels, without = losses(tmp_path / "auto"), losses(tmp_path / "off")
    assert with_kernels == losses(tmp_path / "required")
    assert len(without) > 1 and with_kernels != without  # other roundings: the setting reaches the operators
    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(with_kernels, without, strict=True))


def test_the_log_names_the_optimizers_kernel(pools: Mapping[int, WorkerPool], tmp_path: Path) -> None:
    report = train_well(pools[1], kernel_config("auto", **{"optimizer.name": "adamw_ema"}), tmp_path / "run")
    assert f"{IN_USE}, adamw_ema" in report.output


def test_required_kernels_that_do_not_exist_stop_the_run(pools: Mapping[int, WorkerPool], tmp_path: Path) -> None:
    config = kernel_config("required", **{"train.precision": "fp64"})
    report = run(pools[1], config, tmp_path / "run")
    assert report.error.startswith("ConfigError: train.kernels = required, but ")
    assert report.error.endswith("float64 has no kernels; use train.kernels = auto")
