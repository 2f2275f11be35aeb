"""The files that the documentation tells a person to run or read exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/configuration.md",
    "docs/evaluation.md",
    "docs/methods.md",
    "docs/parallelism.md",
    "docker/Dockerfile",
    "docker/README.md",
    "launch/slurm/pretrain.sbatch",
    "Makefile",
)
NAMED_FILE = re.compile(
    r"(?<![\w./-])((?:launch|ds_configs|docs|docker|requirements|tests)/[\w./-]+\.(?:py|yaml|json|md|png|txt|sbatch))"
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    named = set(NAMED_FILE.findall((ROOT / document).read_text()))
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, f"{document} names {', '.join(missing)}"


def test_the_pattern_finds_what_a_command_names() -> None:
    line = "torchrun --nnodes 4 launch/pretrain.py --config launch/configs/dit_demo.yaml (docs/images/a.png)"
    assert NAMED_FILE.findall(line) == [
        "launch/pretrain.py",
        "launch/configs/dit_demo.yaml",
        "docs/images/a.png",
    ]
