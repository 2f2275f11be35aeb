"""Counter-based random numbers: pure functions of (seed, step, sample id, purpose), in plain PyTorch.

Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The integers are the same
on every device, layout and batch; the normals are the same up to the rounding of log, cos, sin and sqrt.
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
# The two multipliers minus 2**32: |multiplier| < 2**30 keeps every product inside int64 (see _multiply).
_MULTIPLIER_0 = 0xD2511F53 - 2**32
_MULTIPLIER_1 = 0xCD9E8D57 - 2**32
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


class Purpose(IntEnum):
    """What a stream of random numbers is for. Every run's results depend on the values: never renumber."""

    NOISE = 0
    TIMESTEP = 1
    CONDITION = 2
    AUGMENT = 3
    INITIAL = 4
    ORDER = 5
    SAMPLE = 6
    DROPOUT = 7


Seed = int | Tensor  # of all samples, or (B,) int64 of each; 0 <= seed < 2**64, as int64 for tensors


def random_bits(seed: Seed, step: int, sample_ids: Tensor, purpose: Purpose, count: int) -> Tensor:
    """Return `count` random 32-bit words for each sample, as (B, count) int64 in [0, 2**32).

    Word e of a sample is word e % 4 of the block with key (seed low word, seed high word) and counter
    (e // 4, id low word, step, purpose << 24 | id bits 32-55).

    Args:
        seed: one for all samples, 0 <= seed < 2**64, or one each, (B,) int64.
        step: 0 <= step < 2**32 (an optimizer step, a sampler step or an epoch).
        sample_ids: (B,) int64, 0 <= id < 2**56, on the device of the result.
        purpose: which stream.
        count: words per sample, at most 2**34.
    """
    in_range = isinstance(seed, Tensor) or 0 <= seed < 2**64
    if not (in_range and 0 <= step < 2**32 and 0 <= count <= 2**34):
        raise ValueError(
            f"seed = {seed}, step = {step}, count = {count} are out of range; "
            "use 0 <= seed < 2**64, 0 <= step < 2**32, count <= 2**34"
        )
    blocks = torch.arange((count + 3) // 4, device=sample_ids.device).unsqueeze(0)
    if isinstance(seed, Tensor):
        blocks, seed = blocks.expand(len(sample_ids), -1), seed.unsqueeze(1)
    ids = sample_ids.to(torch.int64).unsqueeze(1)
    steps = torch.full_like(ids, step)
    high_ids = (ids >> 32 & 0xFFFFFF) | int(purpose) << 24
    words = philox_4x32((blocks, ids & _MASK, steps, high_ids), (seed & _MASK, seed >> 32 & _MASK))
    return torch.stack(words, dim=-1).flatten(1)[:, :count]


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, ...]:
    """Encrypt counters with ten Philox rounds.

    Args:
        counter: four int64 tensors holding uint32 values, of shapes that broadcast together.
        key: two uint32 values, or int64 tensors of them that broadcast to the shape of the first counter.

    Returns:
        Four int64 tensors holding uint32 values, all of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1.bitwise_xor_(k0) ^ c1, low_1, high_0.bitwise_xor_(k1) ^ c3, low_0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and low word of (multiplier + 2**32) * word; the 2**32 adds `word` to the high one."""
    product = word * multiplier
    high = (product >> 32).add_(word)  # an arithmetic shift floors, so a negative product borrows correctly
    return high, product.bitwise_and_(_MASK)


def normal(
    seed: Seed,
    step: int,
    sample_ids: Tensor,
    purpose: Purpose,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return (B, *shape) standard normals by Box-Muller: words 2i and 2i + 1 give elements 2i and 2i + 1.

    Element 2i is r cos(angle), 2i + 1 is r sin(angle). The arithmetic is float64 for float64 and float32
    otherwise, on the same words, so that all precisions see the same numbers up to rounding.
    """
    count = math.prod(shape)
    num_pairs = (count + 1) // 2
    words = random_bits(seed, step, sample_ids, purpose, 2 * num_pairs).reshape(len(sample_ids), num_pairs, 2)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    # (word + 1/2) / 2**32 is never 0, so the logarithm is finite; |normal| < 6.77.
    radius = words[..., 0].to(work).add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = words[..., 1].to(work).mul_(2.0 * math.pi * 2.0**-32)
    pairs = torch.stack((angle.cos().mul_(radius), angle.sin_().mul_(radius)), dim=-1)
    return pairs.flatten(1)[:, :count].reshape(len(sample_ids), *shape).to(dtype)


def uniform(
    seed: int,
    step: int,
    sample_ids: Tensor,
    purpose: Purpose,
    shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return (B, *shape) uniform numbers in [0, 1): 32 bits in float64, the upper 24 bits in float32."""
    words = random_bits(seed, step, sample_ids, purpose, math.prod(shape)).reshape(len(sample_ids), *shape)
    if dtype == torch.float64:
        return words.to(torch.float64).mul_(2.0**-32)
    return (words >> 8).to(torch.float32).mul_(2.0**-24).to(dtype)


def integers(
    seed: int, step: int, sample_ids: Tensor, purpose: Purpose, high: int, shape: tuple[int, ...] = ()
) -> Tensor:
    """Return (B, *shape) int64 in [0, high), 1 <= high <= 2**31: floor(word * high / 2**32).

    The probabilities of two values differ by at most 2**-32, because words are not rejected.
    """
    if not 1 <= high <= 2**31:
        raise ValueError(f"high = {high} is out of range; use 1 <= high <= 2**31")
    words = random_bits(seed, step, sample_ids, purpose, math.prod(shape)).reshape(len(sample_ids), *shape)
    return words.mul_(high) >> 32


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    """Return (n,) int64 on the CPU: the order of epoch `epoch`, a function of its arguments alone.

    Entry i is sorted by a 63-bit key made of words 2i and 2i + 1; a stable sort decides the (rare) ties.
    """
    words = random_bits(seed, epoch, torch.zeros(1, dtype=torch.int64), Purpose.ORDER, 2 * n).view(n, 2)
    return torch.argsort((words[:, 0] << 31) | (words[:, 1] >> 1), stable=True)
