"""Loads the compiled kernels and decides, call by call, whether a kernel or the PyTorch reference runs."""

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from megadiff.errors import ConfigError

# auto: a kernel where there is one; required: an error where there is none; off: always the PyTorch reference.
Kernels = Literal["auto", "required", "off"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_FOLDER = Path(__file__).parent.parent
# On the meta device the kernels of the CPU say which shapes they make and what they keep.
_LIBRARIES = {"cpu": "_kernels_cpu.abi3.so", "meta": "_kernels_cpu.abi3.so", "cuda": "_kernels_cuda.abi3.so"}
_TensorOrNone = TypeVar("_TensorOrNone", Tensor, Tensor | None)
_log = logging.getLogger(__name__)


@torch.compiler.assume_constant_result  # a compiled graph takes the answer as it was when it was traced
def library_error(device_type: str) -> str | None:
    """Why a device has no kernels here, or None if it has; loads them at the first call."""
    return _load(device_type)


@cache
def _load(device_type: str) -> str | None:
    if device_type not in _LIBRARIES:
        return f"there are no kernels for device {device_type}"
    # The CPU library also holds the schemas of all operators, so it is loaded for every device.
    for name in dict.fromkeys((_LIBRARIES["cpu"], _LIBRARIES[device_type])):
        if not (_FOLDER / name).exists():
            return f"{name} was not built; run `pip install --no-build-isolation -e .` with a C++ compiler (and nvcc)"
        try:
            torch.ops.load_library(str(_FOLDER / name))
        except OSError as error:
            return f"{name} does not load beside torch {torch.__version__} ({error}); build it again"
    _register_once()
    return None


@cache
def _register_once() -> None:
    from megadiff.ops.registration import register  # it imports every operator, and they import this module

    register("megadiff")


def missing_kernel(tensor: Tensor) -> str | None:
    """Why no kernel can take this tensor (device, dtype), or None."""
    if tensor.dtype not in DTYPES:
        return f"{str(tensor.dtype).removeprefix('torch.')} has no kernels"
    return library_error(tensor.device.type)


def use_kernel(op: str, kernels: Kernels, tensor: Tensor) -> bool:
    """True if the kernel of `op` shall run on `tensor`.

    Args:
        op: the operator's name, for messages.
        kernels: the setting.
        tensor: the operator's main argument.

    Raises:
        ConfigError: a kernel is required and cannot run.
    """
    if kernels == "off":
        return False
    reason = missing_kernel(tensor)
    if reason is None:
        return True
    if kernels == "required":
        raise ConfigError(f"train.kernels = required, but {op} has no kernel here: {reason}; use train.kernels = auto")
    if not torch.compiler.is_compiling():
        _tell_once(op, reason)
    return False


@cache
def _tell_once(op: str, reason: str) -> None:
    _log.info("%s runs as PyTorch reference: %s", op, reason)


def describe_kernels(kernels: Kernels, operators: Sequence[str], device: torch.device, dtype: torch.dtype) -> str:
    """One line for the log of a run: how its fused operators run on this device in this dtype.

    Raises:
        ConfigError: kernels are required and cannot run.
    """
    names = ", ".join(operators)
    if kernels == "off":
        return f"kernels: off, PyTorch references of {names}"
    example = torch.empty(0, dtype=dtype, device=device)
    if use_kernel(names, kernels, example):
        return f"kernels: {device.type} {names}"
    return f"kernels: none ({missing_kernel(example)}), PyTorch references of {names}"


def as_float32_or_like(x: Tensor, tensors: Sequence[_TensorOrNone]) -> list[_TensorOrNone]:
    """Small tensors that ride along with x (weights, shifts), in one dtype: x's where all have it, else float32."""
    if all(tensor is None or tensor.dtype == x.dtype for tensor in tensors):
        return list(tensors)
    return [tensor if tensor is None else tensor.float() for tensor in tensors]
