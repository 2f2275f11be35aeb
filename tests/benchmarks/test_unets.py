"""The benchmarks of UNets run on tiny networks and write the rows that they promise."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def rows_of(tmp_path: Path, *command: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a quick run, and what it printed."""
    file = tmp_path / "rows.json"
    result = subprocess.run(
        [sys.executable, *command, "--quick", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(file.read_text())["rows"], result.stdout


def test_a_training_step_is_compared_in_speed_and_in_what_it_saves(tmp_path: Path) -> None:
    (speed, _, saved), printed = rows_of(tmp_path, "benchmarks/train_step.py", "--model", "unet")
    assert speed["ratio"] > 0 and (speed["must"], speed["aim"]) == (1.1, 1.3)
    assert 0 < saved["ours"] < saved["other"] and saved["lower_is_better"]
    assert "UNet2DModel" in printed


def test_both_schedules_are_simulated_and_measured(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path, "benchmarks/pipeline_step.py")
    assert len(rows) == 2
    assert all(row["ours"] > 0 and row["other"] > 0 and row["ratio"] >= 1 for row in rows)


def test_four_architectures_are_trained_and_compared(tmp_path: Path) -> None:
    rows, printed = rows_of(tmp_path, "benchmarks/architecture.py")
    concat, gated, shift, both = rows
    assert [row["name"] for row in rows] == ["concat", "gated", "skip_shift", "gated + skip_shift"]
    assert gated["parameters"] < concat["parameters"] < shift["parameters"]
    assert gated["parameters"] < both["parameters"]
    assert all(row["loss"] > 0 and row["samples_per_second"] > 0 and row["mean_psnr"] > 0 for row in rows)
    assert "published" in printed
