"""The op tests once more, with the CUDA kernels under the address and the thread sanitizer, in other processes."""

import os
import subprocess
import sys

import pytest

from tests.hostcuda.build import ROOT, Mode, build_hostcuda, sanitized_environment

# The whole matrix but opcheck, which says nothing of memory; a few tiny cases, because the thread sanitizer is slow.
SELECTED: dict[Mode, str] = {"address": "megadiff_hostcuda and not opcheck", "thread": "megadiff_hostcuda and tiny"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", SELECTED)
def test_op_tests_under_a_sanitizer(mode: Mode) -> None:
    library = build_hostcuda(mode)
    environment = sanitized_environment(mode) | {"MEGADIFF_HOSTCUDA": str(library), "OMP_NUM_THREADS": "1"}
    # Without randomised addresses: the thread sanitizer needs its own places.
    command = [
        "setarch",
        os.uname().machine,
        "-R",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-s",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "-k", SELECTED[mode], "tests/ops"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
