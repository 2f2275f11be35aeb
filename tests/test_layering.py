"""Imports point down only, and the mathematics sees no ranks (CONTRIBUTING.md draws the picture)."""

from pathlib import Path

import pytest

from tests.layering import LEVEL, check_tree, package_of

ROOT = Path(__file__).resolve().parents[1]


def plant(root: Path, path: str, source: str) -> list[str]:
    """Writes one file into a tree of its own and returns what the checker says about that tree."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    return [str(violation) for violation in check_tree(root)]


def test_imports_point_down_only() -> None:
    violations = check_tree(ROOT)
    assert not violations, "\n".join(map(str, violations))


def test_every_package_has_a_layer() -> None:
    packages = {package_of(path, ROOT) for path in (ROOT / "megadiff").rglob("*.py")} - {"__init__"}
    assert packages, "the walk found no code"
    assert packages <= set(LEVEL)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megadiff/models/dit.py", "from megadiff.parallel.plan import Plan\n"),
        ("megadiff/models/dit.py", "from megadiff.diffusion import schedule\n"),
        ("megadiff/data/loader.py", "import megadiff.engine.trainer\n"),
        ("megadiff/data/loader.py", "from megadiff import engine\n"),
        ("megadiff/data/loader.py", "from ..engine import trainer\n"),
        ("megadiff/ops/fused.py", "def f():\n    from megadiff.models import dit\n"),
        ("megadiff/checkpoint/reader.py", "from megadiff.evaluation import fid\n"),
        ("megadiff/engine/trainer.py", "from launch import pretrain\n"),
        ("megadiff/engine/trainer.py", "from megadiff.cli import main\n"),
        ("megadiff/errors.py", "import megadiff.config\n"),
        ("megadiff/stray/thing.py", "from megadiff.errors import DataError\n"),
    ],
)
def test_an_import_that_points_up_is_caught(tmp_path: Path, path: str, source: str) -> None:
    found = plant(tmp_path, path, source)
    assert len(found) == 1
    assert found[0].startswith(f"{path}:")


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\n",
        "from torch import distributed\n",
        "from torch.distributed import get_rank\n",
        "import torch\n\n\ndef f():\n    return torch.distributed.get_rank()\n",
        "import os\n\nRANK = os.environ['RANK']\n",
        "from os import environ\n",
        "import os\n\nRANK = os.getenv('RANK')\n",
        "import deepspeed\n",
        "from deepspeed.pipe import PipelineModule\n",
    ],
)
@pytest.mark.parametrize("package", ["models", "diffusion"])
def test_the_mathematics_sees_no_ranks(tmp_path: Path, package: str, source: str) -> None:
    assert plant(tmp_path, f"megadiff/{package}/part.py", source)


@pytest.mark.parametrize("source", ["import torch\n", "def f():\n    import numpy\n", "from torch import nn\n"])
def test_config_imports_no_torch(tmp_path: Path, source: str) -> None:
    assert plant(tmp_path, "megadiff/config/load.py", source)


def test_what_is_allowed_passes(tmp_path: Path) -> None:
    allowed = {
        "launch/pretrain.py": "import os\nimport torch.distributed\nfrom megadiff.cli import main\n",
        "megadiff/engine/build.py": "import deepspeed\nfrom megadiff.engine import loop\n",
        "megadiff/models/dit.py": "import os.path\nimport torch\nfrom megadiff.errors import PlanError\n",
        "megadiff/models/chain.py": "from megadiff import __version__\nfrom . import dit\n",
    }
    for path, source in allowed.items():
        assert plant(tmp_path, path, source) == []
