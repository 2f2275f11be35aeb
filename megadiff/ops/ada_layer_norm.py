"""Adaptive LayerNorm (DiT, Peebles and Xie 2022) and the gated residual that closes such a branch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.ops.library import Kernels, as_float32_or_like, use_kernel


def ada_layer_norm(x: Tensor, shift: Tensor, scale: Tensor, eps: float, *, kernels: Kernels = "auto") -> Tensor:
    """LN(x) (1 + scale) + shift, in at least float32 and rounded once to x's dtype.

    Args:
        x: (B, N, D), any float dtype.
        shift, scale: (B, D).
        eps: added to the variance over D.
        kernels: whether the fused kernel may run; it saves x and two numbers a token.
    """
    if not use_kernel("ada_layer_norm", kernels, x):
        return ada_layer_norm_reference(x, shift, scale, eps)
    shift, scale = (_rows(vectors) for vectors in as_float32_or_like(x, (shift, scale)))
    return torch.ops.megadiff.ada_layer_norm(x.contiguous(), shift, scale, eps)[0]


def ada_layer_norm_reference(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """The same in plain PyTorch."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    normed = F.layer_norm(x.to(dtype), x.shape[-1:], eps=eps)
    return (normed * (1 + scale.to(dtype).unsqueeze(1)) + shift.to(dtype).unsqueeze(1)).to(x.dtype)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor, *, kernels: Kernels = "auto") -> Tensor:
    """x + gate y, in at least float32 and rounded once to x's dtype.

    Args:
        x, y: (B, N, D) of one dtype.
        gate: (B, D).
        kernels: whether the fused kernel may run.
    """
    if x.dtype != y.dtype or not use_kernel("gated_residual", kernels, x):
        return gated_residual_reference(x, y, gate)
    (gate,) = as_float32_or_like(x, (gate,))
    return torch.ops.megadiff.gated_residual(x.contiguous(), y.contiguous(), _rows(gate))


def gated_residual_reference(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (x.to(dtype) + gate.to(dtype).unsqueeze(1) * y.to(dtype)).to(x.dtype)


def _rows(vectors: Tensor) -> Tensor:
    """(B, D) whose features are adjacent; rows may lie apart, as those of a chunk do."""
    return vectors if vectors.shape[-1] <= 1 or vectors.stride(-1) == 1 else vectors.contiguous()


def register(library: str) -> None:
    """Tells torch the shapes and the gradients of the operators of `torch.ops.<library>`."""
    operators = getattr(torch.ops, library)

    def norm_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, mean, rstd = ctx.saved_tensors
        grads = operators.ada_layer_norm_backward(grad.contiguous(), x, scale, mean, rstd)
        return grads[0], grads[1].to(scale.dtype), grads[2].to(scale.dtype), None

    def gate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, gate = ctx.saved_tensors
        y_grad, gate_grad = operators.gated_residual_backward(grad.contiguous(), y, gate)
        return grad, y_grad, gate_grad.to(gate.dtype)

    torch.library.register_fake(f"{library}::ada_layer_norm", _fake_norm)
    torch.library.register_fake(f"{library}::ada_layer_norm_backward", _fake_norm_backward)
    torch.library.register_autograd(f"{library}::ada_layer_norm", norm_backward, setup_context=_save_norm)
    torch.library.register_fake(f"{library}::gated_residual", _fake_gate)
    torch.library.register_fake(f"{library}::gated_residual_backward", _fake_gate_backward)
    torch.library.register_autograd(f"{library}::gated_residual", gate_backward, setup_context=_save_gate)


def _fake_norm(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[:2], dtype=torch.float32)
    return x.new_empty(x.shape), statistics, torch.empty_like(statistics)


def _fake_norm_backward(
    y_grad: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    vectors = x.new_empty((x.shape[0], x.shape[2]), dtype=torch.float32)
    return x.new_empty(x.shape), vectors, torch.empty_like(vectors)


def _fake_gate(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gate_backward(out_grad: Tensor, y: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty((y.shape[0], y.shape[2]), dtype=torch.float32)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, _, scale, _ = inputs
    ctx.save_for_backward(x, scale, *output[1:])


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])
