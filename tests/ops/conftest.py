"""Op tests are written once for both builds of the kernels: the CPU's, and CUDA's as they run on the host.

A test that takes the fixture `operators` runs with `torch.ops.megadiff` and with `torch.ops.megadiff_hostcuda`, which
have the same operators. MEGADIFF_HOSTCUDA names a build of the second one with a sanitizer (see tests/hostcuda).
"""

import os
from functools import cache

import pytest
import torch

from megadiff.ops.library import library_error
from megadiff.ops.registration import register
from tests.hostcuda.build import build_hostcuda

LIBRARIES = ("megadiff", "megadiff_hostcuda")


@cache
def load_hostcuda() -> None:
    """Loads the CUDA kernels for the host."""
    torch.ops.load_library(os.environ.get("MEGADIFF_HOSTCUDA") or str(build_hostcuda()))
    register("megadiff_hostcuda")


@pytest.fixture(params=LIBRARIES)
def operators(request: pytest.FixtureRequest) -> torch._ops._OpNamespace:
    """The operators of one build."""
    assert library_error("cpu") is None, library_error("cpu")
    if request.param == "megadiff_hostcuda":
        load_hostcuda()
    return getattr(torch.ops, request.param)
