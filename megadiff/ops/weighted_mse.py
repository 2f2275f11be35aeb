"""Weighted squared error a sample in float32, whatever the dtype of the network's output."""

from typing import Any

import torch
from torch import Tensor

from megadiff.ops.library import Kernels, use_kernel


def weighted_mse(
    output: Tensor, target: Tensor, weight: Tensor, mask: Tensor | None = None, *, kernels: Kernels = "auto"
) -> Tensor:
    """loss[b] = weight[b] sum_i (output[b, i] - target[b, i])^2 over the elements whose mask is not 0.

    Args:
        output: (B, C, ...) or (B, more than C, ...), whose first C channels count. float32, bf16, fp16 or float64.
        target: (B, C, ...) in output's dtype or wider.
        weight: (B,).
        mask: (B, 1, ...) of the target's other dims; elements where it is 0 are left out, whatever they hold.
        kernels: whether the fused kernel may run.

    Returns:
        (B,) float32, or float64 where an input is; differentiable in `output`.
    """
    chosen = None if mask is None else (mask != 0).contiguous()
    if torch.float64 in (output.dtype, target.dtype) or not use_kernel("weighted_mse", kernels, output):
        return reference(output, target, weight, chosen)
    wide = target if target.dtype == output.dtype else target.float()
    return torch.ops.megadiff.weighted_mse(
        output.contiguous(), wide.detach().contiguous(), weight.float().contiguous(), chosen
    )


def reference(output: Tensor, target: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    """The same in plain PyTorch; `mask` is boolean."""
    double = torch.float64 in (output.dtype, target.dtype)
    dtype = torch.float64 if double else torch.float32
    error = output[:, : target.shape[1]].to(dtype) - target.to(dtype)
    if mask is not None:
        error = error.masked_fill(~mask, 0.0)
    return error.square().flatten(1).sum(1) * weight.to(dtype)


def register(library: str) -> None:
    """Tells torch the shapes and the gradient of the operators of `torch.ops.<library>`."""
    operators = getattr(torch.ops, library)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return operators.weighted_mse_backward(grad.contiguous(), *ctx.saved_tensors), None, None, None

    torch.library.register_fake(f"{library}::weighted_mse", _fake_forward)
    torch.library.register_fake(f"{library}::weighted_mse_backward", _fake_backward)
    torch.library.register_autograd(f"{library}::weighted_mse", backward, setup_context=_save)


def _fake_forward(output: Tensor, target: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    return output.new_empty(target.shape[0], dtype=torch.float32)


def _fake_backward(grad: Tensor, output: Tensor, target: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    return torch.empty_like(output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
