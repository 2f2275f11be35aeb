"""The header that runs CUDA kernels on the host: right kernels run, and planted faults are found."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.hostcuda.build import ROOT, Mode, build_program, sanitized_environment

PROGRAM = ROOT / "tests/hostcuda/faults.cpp"
MODES: tuple[Mode, ...] = ("plain", "address", "thread")
FAILED = 99
RIGHT = {"sum": "32 32 32 32", "dynamic": "63 62", "broadcast": "3 4", "allowed_shared": "63 62"}
REFUSED = {"too_much_shared": "invalid argument", "grid": "invalid configuration argument"}
ENDED = {
    "divergent": "divergent barrier or shuffle",
    "two_barriers": "divergent barrier or shuffle",
    "mask": "a lane is not in the mask of its own shuffle",
    "stuck": "some threads never reach a barrier or shuffle",
    "static_shared": "more than 48 KiB of static shared memory",
}


@cache
def program(mode: Mode) -> Path:
    """The kernels with their faults, compiled for a mode."""
    return build_program(PROGRAM, mode)


def run(name: str, mode: Mode) -> subprocess.CompletedProcess[str]:
    """Runs one kernel in a process of its own."""
    command = ["setarch", os.uname().machine, "-R", str(program(mode)), name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_run_in_every_mode(name: str, mode: Mode) -> None:
    done = run(name, mode)
    assert (done.returncode, done.stdout.split()) == (0, RIGHT[name].split()), done.stderr


@pytest.mark.parametrize("name", REFUSED)
def test_a_launch_beyond_a_devices_limits_is_refused(name: str) -> None:
    done = run(name, "plain")
    assert done.returncode == 3 and done.stdout.strip() == f"launch refused: {REFUSED[name]}"


@pytest.mark.parametrize("name", ENDED)
def test_what_cuda_leaves_undefined_ends_the_process_with_a_line(name: str) -> None:
    done = run(name, "plain")
    assert done.returncode == FAILED
    assert f"hostcuda: {ENDED[name]}" in done.stderr and "block (0, 0, 0) thread" in done.stderr


def test_a_missing_barrier_reads_nan_without_any_sanitizer() -> None:
    assert run("missing_barrier", "plain").stdout.replace("-", "").split() == ["nan"] * 4


@pytest.mark.parametrize("name", ["shared_overrun", "dynamic_overrun", "global_overrun"])
def test_the_address_sanitizer_finds_what_lies_outside(name: str) -> None:
    done = run(name, "address")
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr and "faults.cpp" in done.stderr


@pytest.mark.parametrize("name", ["missing_barrier", "block_race"])
def test_the_thread_sanitizer_finds_races_within_and_between_blocks(name: str) -> None:
    done = run(name, "thread")
    assert done.returncode != 0 and "ThreadSanitizer: data race" in done.stderr and "faults.cpp" in done.stderr


@pytest.mark.parametrize(
    ("mode", "name", "report"),
    [
        ("address", "global_overrun", "AddressSanitizer"),
        ("address", "shared_overrun", "AddressSanitizer"),
        ("thread", "missing_barrier", "ThreadSanitizer: data race"),
    ],
)
def test_the_sanitizers_work_inside_a_python_process(mode: Mode, name: str, report: str) -> None:
    """As test_sanitizers.py runs the op tests; without this it might pass because nothing is watched."""
    code = (
        f"import ctypes, torch; ctypes.CDLL({str(build_program(PROGRAM, mode, shared=True))!r}).run_kernel(b{name!r})"
    )
    command = ["setarch", os.uname().machine, "-R", sys.executable, "-c", code]
    environment = sanitized_environment(mode)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and report in done.stderr and "faults.cpp" in done.stderr
    right = subprocess.run(
        [*command[:-1], code.replace(name, "sum")], env=environment, capture_output=True, timeout=120
    )
    assert right.returncode == 0, right.stderr
