"""Guidance and a DDIM update in one pass against eager PyTorch."""

import torch
from kernel_rows.timing import geometric_mean, interleaved, speed_row
from report import Row
from torch import Tensor

from megadiff.ops.solver_step import solver_step

_ALPHA, _SIGMA, _NEXT_ALPHA, _NEXT_SIGMA, _GUIDANCE = 0.6, 0.8, 0.8, 0.6, 4.0


def rows(repeats: int, quick: bool, device: str) -> list[Row]:
    """One row, the geometric mean over the shapes."""
    shapes = [(2, 4, 8, 8)] if quick else [(64, 4, 32, 32), (16, 3, 256, 256)]
    ours, other = (
        geometric_mean(list(times)) for times in zip(*(_times(s, repeats, device) for s in shapes), strict=True)
    )
    must, aim = (2.5, 4.0) if device == "cpu" else (None, None)
    note = f"guidance and DDIM from a v prediction against eager; geometric mean over {shapes}"
    return [speed_row("solver_step", ours, other, must, aim, note)]


def _times(shape: tuple[int, ...], repeats: int, device: str) -> tuple[float, float]:
    x = torch.randn(shape, device=device)
    output = torch.randn(2 * shape[0], *shape[1:], device=device)

    def ours() -> object:
        weights = (_NEXT_SIGMA / _SIGMA, _NEXT_ALPHA - _NEXT_SIGMA * _ALPHA / _SIGMA, 0.0, 0.0, 0.0)
        to_m = (_ALPHA, -_SIGMA)
        return solver_step(
            output, x, to_m=to_m, next_weights=weights, guidance=_GUIDANCE, keep_m=False, kernels="required"
        )

    def eager() -> Tensor:
        conditional, null = output.chunk(2)
        v = torch.lerp(null, conditional, _GUIDANCE)
        x0, eps = _ALPHA * x - _SIGMA * v, _SIGMA * x + _ALPHA * v
        return _NEXT_ALPHA * x0 + _NEXT_SIGMA * eps

    return interleaved(ours, eager, repeats, device)
