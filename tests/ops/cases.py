"""What the tests of all operators share: random tensors, the error rule, and opcheck."""

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normals that depend on the name and shape only."""
    generator = torch.Generator().manual_seed(hash_of(name, shape))
    return torch.randn(shape, generator=generator).to(dtype)


def hash_of(name: str, shape: tuple[int, ...]) -> int:
    """A seed from a name and a shape, the same in every process."""
    seed = 0
    for letter in f"{name}{shape}":
        seed = (seed * 131 + ord(letter)) % 2**31
    return seed


def error(value: Tensor, truth: Tensor) -> float:
    """The largest absolute difference from a float64 truth."""
    return 0.0 if value.numel() == 0 else (value.double() - truth).abs().max().item()


def assert_as_exact_as_eager(ours: Tensor, eager: Tensor, truth: Tensor, name: str = "") -> None:
    """The error rule: at most twice PyTorch's own error in the same dtype.

    PyTorch's result may happen to be exact, so one rounding to the dtype and four of float32 are allowed beside it.
    """
    assert ours.dtype == eager.dtype and ours.shape == eager.shape == truth.shape, name
    if truth.numel() == 0:
        return
    roundings = torch.finfo(ours.dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
    allowed = 2 * error(eager, truth) + roundings * truth.abs().max().item()
    assert error(ours, truth) <= allowed, f"{name}: {error(ours, truth)} > {allowed}"
