"""The fixture `operators` of the op tests, here the CUDA kernels on a real device; tests hand in tensors of the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megadiff.ops.library import library_error


class _ToDevice(torch.autograd.Function):
    """A copy on the GPU with the same strides and the same place within 32 elements; gradients keep their strides."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() % 32
        buffer = torch.zeros(start + max(span, 0), dtype=tensor.dtype, device="cuda")
        return buffer.as_strided(tensor.shape, tensor.stride(), start).copy_(tensor)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        return grads[0].cpu()


def to_device(tensor: Tensor) -> Tensor:
    """A tensor as the device's operators take it."""
    moved: Tensor = _ToDevice.apply(tensor)
    return moved


class DeviceOperators:
    """`torch.ops.megadiff` for tensors of the CPU: takes them to the GPU, and brings back results and what changed."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.megadiff, name)
        is_in_place = name.endswith("_")

        def call(*args: Any, **named: Any) -> Any:
            moved = tree_map_only(Tensor, to_device, args)
            result = operator(*moved, **tree_map_only(Tensor, to_device, named))
            if is_in_place:
                for before, after in zip(args, moved, strict=True):
                    if isinstance(before, Tensor):
                        before.copy_(after)
            return tree_map_only(Tensor, lambda tensor: tensor.cpu(), result)

        return call


@pytest.fixture
def operators() -> DeviceOperators:
    """The operators on the GPU."""
    assert library_error("cuda") is None, library_error("cuda")
    return DeviceOperators()
