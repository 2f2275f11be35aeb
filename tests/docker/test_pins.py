"""The image installs the versions that the project pins, and NVIDIA's apex rather than its namesake."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()


def argument(name: str) -> str:
    """The default of one `ARG NAME=value`."""
    found = re.findall(rf"^ARG {name}=(\S+)$", DOCKERFILE, flags=re.MULTILINE)
    assert len(found) == 1, f"ARG {name} is declared {len(found)} times with a value"
    return str(found[0])


def pin(package: str) -> str:
    """The version of a package in requirements/constraints.txt; it must not depend on the Python version."""
    lines = (ROOT / "requirements/constraints.txt").read_text().splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    found = [requirement for requirement in parsed if requirement.name == package]
    assert len(found) == 1 and found[0].marker is None
    return str(found[0].specifier).removeprefix("==")


def run_commands() -> list[str]:
    """The RUN instructions, each joined to one line."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix("RUN ") for line in joined.splitlines() if line.startswith("RUN ")]


@pytest.mark.parametrize(("name", "package"), [("TORCH_VERSION", "torch"), ("FLASH_ATTN_VERSION", "flash-attn")])
def test_pins_equal_those_of_the_project(name: str, package: str) -> None:
    assert argument(name) == pin(package)


def test_the_base_image_is_a_pinned_cuda_devel_image() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)
    assert len(bases) == 1
    assert re.fullmatch(r"nvidia/cuda:\$\{CUDA_VERSION\}(-cudnn)?-devel-ubuntu\d\d\.\d\d", bases[0])
    assert re.fullmatch(r"13\.0\.\d", argument("CUDA_VERSION"))  # torch's wheels are built with CUDA 13.0


def test_apex_comes_from_nvidias_source_at_a_tag() -> None:
    assert re.fullmatch(r"\d\d\.\d\d", argument("APEX_TAG"))
    clones = [command for command in run_commands() if "git clone" in command]
    assert len(clones) == 1
    assert '--branch "$APEX_TAG" https://github.com/NVIDIA/apex.git' in clones[0]
    assert "APEX_CPP_EXT=1" in clones[0] and "APEX_CUDA_EXT=1" in clones[0]
    assert not re.search(r"pip install[^&]*\sapex(\s|=|$)", " ".join(run_commands()))


def test_every_pip_install_is_pinned() -> None:
    """A call takes the constraints file, or installs one thing at a given version without dependencies."""
    installs = [part for command in run_commands() for part in command.split("&&") if "pip install" in part]
    assert len(installs) >= 4
    for install in installs:
        assert "-c requirements/constraints.txt" in install or "--no-deps" in install, install


def test_compute_capabilities() -> None:
    assert 'TORCH_CUDA_ARCH_LIST="8.0 9.0"' in DOCKERFILE
