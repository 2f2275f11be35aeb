"""Noising and training target in one pass against eager PyTorch."""

from collections.abc import Sequence

import torch
from kernel_rows.timing import geometric_mean, interleaved, speed_row
from report import Row
from torch import Tensor

from megadiff.ops.diffuse import diffuse, diffuse_given


def rows(repeats: int, quick: bool, device: str) -> list[Row]:
    """Noise given, and noise of our own; ratios are geometric means over the shapes."""
    shapes = [(2, 4, 8, 8)] if quick else [(64, 4, 32, 32), (16, 3, 256, 256)]
    limits = (
        {"given": (2.3, 3.5), "own": (1.8, 3.0)} if device == "cpu" else {"given": (None, None), "own": (None, None)}
    )
    return [_row(kind, shapes, repeats, device, *limits[kind]) for kind in limits]


def _row(
    kind: str, shapes: Sequence[tuple[int, ...]], repeats: int, device: str, must: float | None, aim: float | None
) -> Row:
    pairs = [_times(kind, shape, repeats, device) for shape in shapes]
    ours, other = (geometric_mean(list(times)) for times in zip(*pairs, strict=True))
    name = "diffuse, noise given" if kind == "given" else "diffuse, own noise"
    peer = "eager x_t and v" if kind == "given" else "torch.randn, eager x_t and v"
    return speed_row(name, ours, other, must, aim, f"against {peer}; geometric mean over {shapes}")


def _times(kind: str, shape: tuple[int, ...], repeats: int, device: str) -> tuple[float, float]:
    x0, noise = torch.randn(shape, device=device), torch.randn(shape, device=device)
    angle = torch.rand(shape[0], device=device) * 1.5
    alpha, sigma = angle.cos(), angle.sin()
    coefficients = torch.stack([alpha, sigma, alpha, -sigma], dim=1)
    ids = torch.arange(shape[0], device=device)
    column = (shape[0], *[1] * (len(shape) - 1))

    def eager(noise: Tensor) -> tuple[Tensor, Tensor]:
        a, s = alpha.view(column), sigma.view(column)
        return a * x0 + s * noise, a * noise - s * x0

    if kind == "given":
        return interleaved(
            lambda: diffuse_given(x0, noise, coefficients, kernels="required"), lambda: eager(noise), repeats, device
        )
    return interleaved(
        lambda: diffuse(x0, coefficients, 7, 3, ids, kernels="required"),
        lambda: eager(torch.randn_like(x0)),
        repeats,
        device,
    )
