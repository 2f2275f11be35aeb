"""Noise, noisy sample and training target in one pass; the noise itself is never stored."""

import torch
from torch import Tensor

from megadiff.ops.library import Kernels, use_kernel
from megadiff.ops.philox import Purpose, normal

_WORD = 0xFFFFFFFF


def diffuse(
    x0: Tensor,
    coefficients: Tensor,
    seed: int,
    step: int,
    sample_ids: Tensor,
    purpose: Purpose = Purpose.NOISE,
    *,
    kernels: Kernels = "auto",
) -> tuple[Tensor, Tensor]:
    """x_t = alpha x0 + sigma n and target = a n + b x0, with the normals n of `philox.normal`.

    Args:
        x0: (B, ...) clean samples, any float dtype; no gradient flows through them.
        coefficients: (B, 4): alpha, sigma, a, b. (a, b) is (1, 0) for eps, (0, 1) for x0, (alpha, -sigma) for v and
            (1, -1) for flow matching.
        seed, step, sample_ids, purpose: fix the noise, see `philox.random_bits`.
        kernels: whether the fused kernel may run.

    Returns:
        x_t and target, in x0's shape and dtype; computed in at least float32 and rounded once.
    """
    x0 = x0.detach()
    if not use_kernel("diffuse", kernels, x0):
        dtype = torch.promote_types(x0.dtype, torch.float32)
        return reference(x0, normal(seed, step, sample_ids, purpose, tuple(x0.shape[1:]), dtype), coefficients)
    return torch.ops.megadiff.diffuse(
        x0.contiguous(), coefficients.float(), sample_ids.contiguous(), seed & _WORD, seed >> 32, step, int(purpose)
    )


def diffuse_given(
    x0: Tensor, noise: Tensor, coefficients: Tensor, *, kernels: Kernels = "auto"
) -> tuple[Tensor, Tensor]:
    """The same with the noise given, (B, ...) in x0's dtype."""
    x0, noise = x0.detach(), noise.detach()
    if not use_kernel("diffuse", kernels, x0):
        return reference(x0, noise, coefficients)
    return torch.ops.megadiff.diffuse_given(x0.contiguous(), noise.contiguous(), coefficients.float())


def reference(x0: Tensor, noise: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """`diffuse_given` in plain PyTorch."""
    dtype = torch.promote_types(x0.dtype, torch.float32)
    columns = coefficients.to(dtype).view(len(x0), 4, *[1] * (x0.dim() - 1)).unbind(1)
    alpha, sigma, of_noise, of_x0 = columns
    clean, n = x0.to(dtype), noise.to(dtype)
    return (alpha * clean + sigma * n).to(x0.dtype), (of_noise * n + of_x0 * clean).to(x0.dtype)


def register(library: str) -> None:
    """Tells torch the shapes of the operators of `torch.ops.<library>`; they have no gradient."""
    torch.library.register_fake(f"{library}::diffuse", _fake)
    torch.library.register_fake(f"{library}::diffuse_given", _fake)
    torch.library.register_fake(f"{library}::philox_bits", _fake_bits)


def _fake(x0: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x0), torch.empty_like(x0)


def _fake_bits(sample_ids: Tensor, seed_low: int, seed_high: int, step: int, purpose: int, count: int) -> Tensor:
    return sample_ids.new_empty((sample_ids.shape[0], count))
