"""Every CUDA file compiles for A100 and Hopper without a warning of ours and without spilling registers."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.hostcuda.build import ROOT

SOURCES = sorted((ROOT / "csrc/cuda").glob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_90")
KERNEL = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
USE = re.compile(r"(\d+) bytes spill stores.*?Used (\d+) registers(?:.*?, (\d+) bytes smem)?", re.DOTALL)


def compile_verbosely(source: Path, architecture: str) -> str:
    """What ptxas says of every kernel of a file."""
    number = architecture.removeprefix("sm_")
    target = [f"-gencode=arch=compute_{number},code={architecture}", "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}"]
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror", "-Xptxas", "-v"]
    done = subprocess.run(
        ["nvcc", *target, *strict, "-cubin", "-o", "/dev/null", str(source)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def kernels(report: str) -> list[tuple[str, int, int, int]]:
    """(name, spilled bytes, registers, static shared bytes) of every kernel."""
    parts = KERNEL.split(report)[1:]
    found = []
    for name, _, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        use = USE.search(text)
        assert use is not None, text
        found.append((name, int(use[1]), int(use[2]), int(use[3] or 0)))
    return found


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which is not on PATH")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_cuda_compiles_without_warnings_and_spills(
    source: Path, architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = kernels(compile_verbosely(source, architecture))
    registers, shared = (max((kernel[index] for kernel in found), default=0) for index in (2, 3))
    with capsys.disabled():
        print(
            f"\n{source.name} {architecture}: {len(found)} kernels, at most {registers} registers, "
            f"{shared} bytes of static shared memory, {sum(kernel[1] for kernel in found)} bytes spilled",
            end="",
        )
    assert not [kernel for kernel in found if kernel[1]], "registers spill"
