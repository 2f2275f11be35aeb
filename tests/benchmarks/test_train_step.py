"""The benchmark runs, and the bytes that it counts are those of the closed form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quick_benchmark_writes_its_rows(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "benchmarks/train_step.py", "--quick", "--json", str(tmp_path / "rows.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    speed, _, *traffic = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert speed["ratio"] > 0 and (speed["must"], speed["aim"], speed["lower_is_better"]) == (1.0, 1.2, False)
    assert len(traffic) == 4
    assert all(row["ratio"] == row["must"] == 1.0 and row["ours"] > 10_000 for row in traffic)
    assert "carries a time and label embedder in every block" in result.stdout
