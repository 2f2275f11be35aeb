"""Starts launchers and scripts as a user would, with a time-out, and finds what they left running.

Every process that descends from a started command carries a token in its environment, whatever session it is in.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PYTHON = sys.executable
DEEPSPEED = (str(BIN / "deepspeed"),)
TORCHRUN = (str(BIN / "torchrun"),)
PRETRAIN = str(ROOT / "launch/pretrain.py")
SAMPLE = str(ROOT / "launch/sample.py")
LIMIT_SECONDS = 300.0  # a launch takes about ten; the machine may be busy

_TOKEN = "MEGADIFF_TEST_TOKEN"
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SETTLE_SECONDS = 5.0


@dataclass(frozen=True)
class Finished:
    """How a command ended. `survivors` are the commands of processes that it left behind (they are ended)."""

    code: int
    out: str
    err: str
    ended_at: float
    survivors: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.out + self.err


class Running:
    """A started command with its output in files."""

    def __init__(self, command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> None:
        """Starts it from the repository root.

        Args:
            command: program and arguments.
            folder: for the output; made if missing.
            variables: more environment variables.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.command, self.token = list(command), uuid.uuid4().hex
        self._out, self._err = folder / f"{self.token}.out", folder / f"{self.token}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**environment(), _TOKEN: self.token, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, limit_seconds: float = LIMIT_SECONDS) -> Finished:
        """Waits for the end; too late is a failed test, and nothing stays behind either way."""
        try:
            code = self.process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(
                f"{' '.join(self.command)} did not end in {limit_seconds:g} s\n{self._read()}"
            ) from None
        ended_at = time.time()
        survivors = self._survivors()
        self.stop()
        return Finished(code, _text(self._out), _text(self._err), ended_at, survivors)

    def stop(self) -> None:
        """Ends the command and all that descends from it."""
        for process in self._descendants():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        self.process.wait()

    def _survivors(self) -> tuple[str, ...]:
        """What still runs shortly after the launcher ended."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (left := self._descendants()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return tuple(f"{process.pid} {process.name()}" for process in left if process.is_running())

    def _descendants(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_TOKEN) == self.token:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _read(self) -> str:
        return _text(self._out) + _text(self._err)


def environment() -> dict[str, str]:
    """What a user's shell would hold: the interpreter's folder first on the path, and no launcher's variables."""
    kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def run(
    command: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> Finished:
    """Runs a command to its end."""
    return Running(command, folder, variables).wait(limit_seconds)


def succeed(command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> Finished:
    """Runs a command that must end with exit code 0 and leave no process."""
    finished = run(command, folder, variables)
    assert finished.code == 0, finished.text
    assert not finished.survivors, finished.survivors
    return finished


def losses(run_dir: Path) -> list[float]:
    """The losses of steps 1, 2, ... in a run's log."""
    records = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def error_lines(text: str) -> list[str]:
    """The lines that report an error of the user."""
    return [line for line in text.splitlines() if "megadiff: error:" in line]


def _text(path: Path) -> str:
    return path.read_text(errors="replace")
