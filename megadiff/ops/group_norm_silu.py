"""GroupNorm (Wu and He 2018) with what surrounds it in a ResNet block: an added embedding before, scale, shift and SiLU
after. N samples, C channels, G groups.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.ops.library import Kernels, as_float32_or_like, use_kernel


def group_norm_silu(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    silu: bool = True,
    offset: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    kernels: Kernels = "auto",
) -> Tensor:
    """silu(GN(x + offset) (1 + scale) + shift), in at least float32 and rounded once to x's dtype.

    Args:
        x: (N, C, ...), any float dtype. Channels-last 4-D and 5-D tensors keep their layout; others become contiguous.
        groups: G, a divisor of C.
        weight, bias: (C,), the norm's affine map.
        eps: added to the variance of a group.
        silu: whether x sigmoid(x) closes the chain.
        offset: (N, C), added before the norm.
        scale, shift: (N, C), applied after it.
        kernels: whether the fused kernel may run; it saves x and two numbers a group.

    Returns:
        The shape, dtype and layout of x; differentiable in every tensor.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, with the argument, what was expected and what came.
        ConfigError: a kernel is required and cannot run.
    """
    parameters = (weight, bias, offset, scale, shift)
    if not use_kernel("group_norm_silu", kernels, x):
        return reference(x, *parameters, groups, eps, silu)
    weight, bias, offset, scale, shift = (_adjacent(values) for values in as_float32_or_like(x, parameters))
    dense = x.contiguous(memory_format=_layout(x))
    return torch.ops.megadiff.group_norm_silu(dense, weight, bias, offset, scale, shift, groups, eps, silu)[0]


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> Tensor:
    """The same in plain PyTorch."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    over_positions = (..., *[None] * (x.dim() - 2))

    def wide(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(dtype)

    out = x.to(dtype)
    if offset is not None:
        out = out + offset.to(dtype)[over_positions]
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # the backward pass of torch 2.13 fails on a bias alone
    # Unlike F.group_norm, it also takes one number a group.
    out = torch.group_norm(out, groups, wide(weight), wide(bias), eps)
    if scale is not None:
        out = out * (1 + scale.to(dtype)[over_positions])
    if shift is not None:
        out = out + shift.to(dtype)[over_positions]
    return (F.silu(out) if silu else out).to(x.dtype)


def _layout(x: Tensor) -> torch.memory_format:
    """The layout in which the kernel takes x: its own where it is channels-last, else contiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _adjacent(values: Tensor | None) -> Tensor | None:
    """Values whose channels are adjacent; rows may lie apart, as those of a chunk do."""
    return values if values is None or values.shape[-1] <= 1 or values.stride(-1) == 1 else values.contiguous()


def register(library: str) -> None:
    """Tells torch the shapes and the gradient of the operators of `torch.ops.<library>`."""
    operators = getattr(torch.ops, library)

    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, *parameters = ctx.saved_tensors
        if grad.stride() != x.stride():
            grad = torch.empty_like(x).copy_(grad)
        x_grad, *grads = operators.group_norm_silu_backward(grad, x, *parameters, mean, rstd, ctx.groups, ctx.silu)
        small = [
            None if values is None else gradient.to(values.dtype)
            for gradient, values in zip(grads, parameters, strict=True)
        ]
        return x_grad, *small, None, None, None

    torch.library.register_fake(f"{library}::group_norm_silu", _fake_forward)
    torch.library.register_fake(f"{library}::group_norm_silu_backward", _fake_backward)
    torch.library.register_autograd(f"{library}::group_norm_silu", backward, setup_context=_save)


def _fake_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty((x.shape[0], groups), dtype=torch.float32)
    return torch.empty_like(x), statistics, torch.empty_like(statistics)


def _fake_backward(
    y_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
) -> tuple[Tensor, ...]:
    small = [
        x.new_empty(0 if values is None else values.shape, dtype=torch.float32)
        for values in (weight, bias, offset, scale, shift)
    ]
    return torch.empty_like(x), *small


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, *parameters, ctx.groups, _, ctx.silu = inputs
    ctx.save_for_backward(x, *output[1:], *parameters)
