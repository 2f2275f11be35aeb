"""What the package says about itself: versions, dependencies, licence, pins, and a build without torch."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[1]
CORE = {"torch", "deepspeed", "safetensors", "transformers", "sentencepiece", "pillow", "tensorboard"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(*extras: str) -> dict[str, Requirement]:
    lines = list(project()["dependencies"])
    for extra in extras:
        lines += project()["optional-dependencies"][extra]
    return {canonicalize_name(parsed.name): parsed for parsed in map(Requirement, lines)}


def pins(python_version: str) -> dict[str, str]:
    """Package -> pinned version under one Python version."""
    lines = (ROOT / "requirements/constraints.txt").read_text().splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    chosen = [pin for pin in parsed if pin.marker is None or pin.marker.evaluate({"python_version": python_version})]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in chosen}
    assert len(versions) == len(chosen), f"a package is pinned twice under Python {python_version}"
    return versions


def test_python_and_licence() -> None:
    supported = SpecifierSet(project()["requires-python"])
    assert [minor for minor in range(8, 17) if f"3.{minor}.1" in supported] == [10, 11, 12, 13]
    assert project()["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence


def test_core_dependencies() -> None:
    core = requirements()
    assert set(core) >= CORE | {"pydantic", "tqdm"}
    assert core["torch"].specifier == SpecifierSet(">=2.10")
    assert core["deepspeed"].specifier == SpecifierSet(">=0.19.8")


def test_apex_of_pypi_and_packages_that_need_nvcc_are_never_installed() -> None:
    extras = set(project()["optional-dependencies"])
    assert extras >= {"gpu", "demo", "evaluate", "int8", "ocr", "dev"}
    assert "apex" not in requirements(*extras) and "apex" not in pins("3.11")
    assert "flash-attn" in requirements("gpu")
    assert "flash-attn" not in requirements(*(extras - {"gpu"}))


@pytest.mark.parametrize("python_version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_listed_package_is_pinned_within_its_range(python_version: str) -> None:
    pinned = pins(python_version)
    for name, requirement in requirements("gpu", "demo", "evaluate", "int8", "ocr", "dev").items():
        assert name in pinned, f"{name} has no pin"
        assert pinned[name] in requirement.specifier, f"{name}=={pinned[name]} is outside {requirement}"


def test_the_torch_pin_has_no_local_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins("3.11")["torch"])


def test_setup_imports_no_torch() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    top_level = [ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert top_level and not [line for line in top_level if "torch" in line or "deepspeed" in line]
    build_needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {canonicalize_name(Requirement(need).name) for need in build_needs} <= {"setuptools", "wheel"}


def test_console_script() -> None:
    assert project()["scripts"] == {"megadiff": "megadiff.cli:main"}
