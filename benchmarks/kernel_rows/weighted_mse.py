"""The weighted squared error against eager PyTorch, forward and backward."""

import torch
from kernel_rows.timing import interleaved, speed_row
from report import Row

from megadiff.ops.weighted_mse import reference, weighted_mse


def rows(repeats: int, quick: bool, device: str) -> list[Row]:
    """One row of forward and backward together."""
    shape = (2, 4, 8, 8) if quick else (64, 4, 32, 32) if device == "cpu" else (256, 4, 64, 64)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    output = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    target = torch.randn(shape, device=device)
    weight = torch.rand(shape[0], device=device)
    fused, plain = interleaved(
        lambda: torch.autograd.grad(weighted_mse(output, target, weight, kernels="required").sum(), output),
        lambda: torch.autograd.grad(reference(output, target, weight, None).sum(), output),
        repeats,
        device,
    )
    note = f"{shape}, output {str(dtype).removeprefix('torch.')}, target float32, against eager"
    return [speed_row("weighted_mse with backward", fused, plain, note=note)]
