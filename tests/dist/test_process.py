"""A group of one: it opens no port, and programs that it starts are on their own again."""

import os
import subprocess
import sys

_STARTS = "from megadiff.dist import process; print('size', process.start(60).world_size, flush=True); "
_STARTS_ITSELF_AGAIN = _STARTS + "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


def test_a_program_started_from_a_group_of_one_makes_its_own() -> None:
    command = [sys.executable, "-c", _STARTS_ITSELF_AGAIN, _STARTS]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["size 1", "size 1"]
