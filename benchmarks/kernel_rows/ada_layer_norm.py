"""Adaptive LayerNorm and gated residual against eager PyTorch, forward and backward."""

import torch
from kernel_rows.timing import interleaved, speed_row
from report import Row
from torch import Tensor

from megadiff.ops.ada_layer_norm import (
    ada_layer_norm,
    ada_layer_norm_reference,
    gated_residual,
    gated_residual_reference,
)

_EPS = 1e-6


def rows(repeats: int, quick: bool, device: str) -> list[Row]:
    """One row forward and one with backward; (B, N, D) of a DiT-S on the CPU, of a DiT-XL on CUDA."""
    shape = (2, 16, 64) if quick else (16, 256, 384) if device == "cpu" else (128, 256, 1152)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    vectors = torch.randn(shape[0], 3 * shape[2], dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn_like(x)

    def ours() -> Tensor:
        shift, scale, gate = vectors.chunk(3, dim=-1)
        normed = ada_layer_norm(x, shift, scale, _EPS, kernels="required")
        return gated_residual(x, normed, gate, kernels="required")

    def eager() -> Tensor:
        shift, scale, gate = vectors.chunk(3, dim=-1)
        return gated_residual_reference(x, ada_layer_norm_reference(x, shift, scale, _EPS), gate)

    note = f"{shape}, {str(dtype).removeprefix('torch.')}: LayerNorm, modulation, gate and residual against eager"
    with torch.no_grad():
        fused, plain = interleaved(ours, eager, repeats, device)
    forward = speed_row("ada_layer_norm + gated_residual forward", fused, plain, note=note)
    fused, plain = interleaved(
        lambda: torch.autograd.grad(ours(), (x, vectors), grad),
        lambda: torch.autograd.grad(eager(), (x, vectors), grad),
        repeats,
        device,
    )
    both = speed_row("ada_layer_norm + gated_residual with backward", fused, plain)
    return [forward, both]
