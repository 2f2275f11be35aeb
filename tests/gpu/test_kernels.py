"""The op tests once more with the CUDA kernels on a device: `pytest -m gpu`. opcheck would say nothing new there."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device (torch.cuda.is_available() is False)", allow_module_level=True)

pytestmark = pytest.mark.gpu

# Every test of tests/ops that runs on any build of the operators.
for path in sorted((Path(__file__).parents[1] / "ops").glob("test_*.py")):
    for name, test in vars(import_module(f"tests.ops.{path.stem}")).items():
        if name.startswith("test_") and "opcheck" not in name and "operators" in inspect.signature(test).parameters:
            globals()[f"{path.stem}_{name.removeprefix('test_')}"] = test
