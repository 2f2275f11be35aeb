"""The benchmark of sampling runs and prints every technique beside its alternative."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_technique_has_its_rows(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/sampling.py", "--quick", "--json", str(tmp_path / "rows.json")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    for title in (
        "unipc in 20",
        "order of heun",
        "time outside",
        "trained unet",
        "dynamic steps dit",
        "feature cache unet",
        "int8 dit",
    ):
        assert any(name.startswith(title) for name in rows), title
    # Orders do not depend on how long the networks were trained.
    orders = [row for name, row in rows.items() if name.startswith("order of")]
    assert len(orders) == 7 and all(row["ratio"] >= row["must"] for row in orders)
