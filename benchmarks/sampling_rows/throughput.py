"""A list of pictures on two processes against one picture after another on one, as the command itself tells it."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from report import Row
from sampling_rows.networks import run_folder

_ROOT = Path(__file__).resolve().parents[2]
_TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
_MADE = re.compile(r"made \d+ images in [\d.]+ s \(([\d.]+) images/s\)")


def rows(quick: bool) -> Iterator[Row]:
    """A row a network; starting the processes and loading the network are left out on both sides."""
    count, repeats = (4, 1) if quick else (32, 3)
    for name in ("dit", "unet"):
        folder = run_folder(name, quick)
        with tempfile.TemporaryDirectory() as scratch:
            listed = Path(scratch) / "list.jsonl"
            lines = ({"class": index % 6, "seed": index, "steps": 4 if quick else 20} for index in range(count))
            listed.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
            pairs = [
                (_rate(_TWO, 32, "1", folder, listed), _rate((), 1, str(os.cpu_count()), folder, listed))
                for _ in range(repeats)
            ]
        ours, other = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        title = f"throughput {name}: two processes against one after another"
        yield Row(title, ours, other, "images/s", ours / other, 1.7, 1.9)


def _rate(launcher: tuple[str, ...], batch_size: int, threads: str, folder: Path, listed: Path) -> float:
    """Images a second of one run into an empty folder."""
    with tempfile.TemporaryDirectory() as output:
        arguments = ["--checkpoint", str(folder), "--requests", str(listed), "--output", output]
        command = [sys.executable, *launcher, "launch/sample.py", *arguments, "--batch-size", str(batch_size)]
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    found = _MADE.search(done.stdout)
    if found is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(found[1])
