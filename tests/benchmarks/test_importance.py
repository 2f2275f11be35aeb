"""The benchmark of importance sampling runs on a tiny network and writes the rows that it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_density_is_compared_with_a_uniform_draw(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/importance.py", "--quick", "--threads", "1", "--json", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["rows"]
    names = [row["name"] for row in rows]
    for prediction in ("eps", "v"):
        assert f"step with importance, {prediction}" in names
        assert all(f"variance of the loss, {prediction}, density {name}" in names for name in ("loss", "gradient"))
    assert all(row["ratio"] > 0 for row in rows) and len(rows) == 8
    limits = [(row["must"], row["aim"]) for row in rows if row["must"] is not None]
    assert limits == [(1.03, 1.01), (2.0, 3.0), (1.03, 1.01), (1.5, 2.0)]
