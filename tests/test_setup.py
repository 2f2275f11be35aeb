"""The build script: without a compiler it installs references with one line, and a compiler that fails is an error."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the build script reads, without built libraries."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "megadiff").mkdir()
    (tmp_path / "megadiff/__init__.py").touch()
    return tmp_path


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Builds in place."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    settings = {**os.environ, "MEGADIFF_CUDA": "0", **environment}
    return subprocess.run(command, cwd=tree, env=settings, capture_output=True, text=True, timeout=300)


def libraries(tree: Path) -> list[Path]:
    return list((tree / "megadiff").glob("*.so"))


def test_a_missing_compiler_is_one_line(tree: Path) -> None:
    done = build(tree, CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("megadiff")]
    assert lines == [
        "megadiff: no compiler `no-such-compiler` was found: installed without kernels, PyTorch references run instead"
    ]
    assert not libraries(tree)


@pytest.mark.parametrize("settings", [{"CXX": "false"}, {"MEGADIFF_CUDA": "1", "NVCC": "false", "CXX": "true"}])
def test_a_compiler_that_fails_is_an_error(tree: Path, settings: dict[str, str]) -> None:
    assert build(tree, **settings).returncode != 0 and not libraries(tree)
