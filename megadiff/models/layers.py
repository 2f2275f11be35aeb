"""Layers that the networks share: norms, attention, feed-forward, time embedding.

Shape letters: B samples, C channels, N tokens, M tokens of a context, D width, H heads, d width of a head, K modulation
vectors.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.models.dropout import AttentionDropout, random_stream
from megadiff.ops.attention import AttentionBackend, attend
from megadiff.ops.backends import Backends
from megadiff.ops.group_norm_silu import group_norm_silu
from megadiff.ops.library import Kernels
from megadiff.ops.rms_norm import NormBackend, rms_norm

NORM_EPS = 1e-6
_DEFAULTS = Backends()


class Modulation(NamedTuple):
    """One adaLN triple, each (B, D)."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim with a learnt scale, in at least float32."""

    def __init__(self, dim: int, backend: NormBackend) -> None:
        super().__init__()
        self.norm_backend: NormBackend = backend
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, NORM_EPS, self.norm_backend)


class GroupNorm(nn.Module):
    """GroupNorm with a learnt affine map of (B, C, ...), with SiLU after it unless `silu` is False.

    The number of groups is the network's, so that a tensor-parallel shard is one with fewer groups and channels.
    """

    def __init__(self, num_groups: int, channels: int, eps: float, backends: Backends, silu: bool = True) -> None:
        super().__init__()
        self.num_groups, self.channels, self.eps, self.silu = num_groups, channels, eps, silu
        self.kernels: Kernels = backends.kernels
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(
        self, x: Tensor, offset: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        """act(GN(x + offset) (1 + scale) + shift); the optional ones are (B, C)."""
        return group_norm_silu(
            x,
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            silu=self.silu,
            offset=offset,
            scale=scale,
            shift=shift,
            kernels=self.kernels,
        )


class Attention(nn.Module):
    """Multi-head attention of (B, N, D) to itself, or to a context (B, M, context_dim); gives (B, N, D).

    Queries, keys and values have weights of their own, and the number of heads is read off the projections' width, so
    the same code runs on a tensor-parallel shard that holds some of the heads.

    Args:
        tile: where positive, the tokens are a square map, row by row, and attend within tiles of so many a side.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qk_norm: bool,
        dropout: float,
        backends: Backends = _DEFAULTS,
        *,
        context_dim: int | None = None,
        qkv_bias: bool = True,
        tile: int = 0,
    ) -> None:
        super().__init__()
        self.head_dim, self.tile = dim // num_heads, tile
        self.backend: AttentionBackend = backends.attention
        self.q = nn.Linear(dim, dim, qkv_bias)
        self.k, self.v = (nn.Linear(context_dim or dim, dim, qkv_bias) for _ in range(2))
        self.q_norm = RMSNorm(self.head_dim, backends.norm) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, backends.norm) if qk_norm else nn.Identity()
        self.dropout = AttentionDropout(dropout)
        self.out = nn.Linear(dim, dim)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, N, d)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        q, k = self.q_norm(self._heads(self.q(x))), self.k_norm(self._heads(self.k(source)))
        v = self._heads(self.v(source))
        side = math.isqrt(x.shape[1])
        is_tiled = 0 < self.tile < side
        if is_tiled:
            q, k, v = (to_tiles(part, side, self.tile) for part in (q, k, v))
        dropout = self.dropout.probability if self.training else 0.0
        with random_stream(self.dropout.stream if dropout else 0):
            mixed = attend(q, k, v, dropout, self.backend)
        if is_tiled:
            mixed = from_tiles(mixed, side, self.tile)
        return self.out(mixed.transpose(1, 2).flatten(2))


def to_tiles(x: Tensor, side: int, tile: int) -> Tensor:
    """(B, H, side * side, d) by rows -> (B * tiles, H, tile * tile, d); `tile` divides `side`."""
    tiles = side // tile
    split = x.unflatten(2, (tiles, tile, tiles, tile))
    return split.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)


def from_tiles(x: Tensor, side: int, tile: int) -> Tensor:
    """The inverse of `to_tiles`."""
    tiles = side // tile
    split = x.unflatten(0, (-1, tiles, tiles)).unflatten(4, (tile, tile))
    return split.permute(0, 3, 1, 4, 2, 5, 6).flatten(2, 5)


class FeedForward(nn.Module):
    """Two linear layers with a tanh-approximated GELU between, (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class GatedFeedForward(nn.Module):
    """GEGLU: fc2(fc1(x) * gelu(gate(x))), (B, N, D) -> (B, N, D) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.gate = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x) * F.gelu(self.gate(x)))


class TimeEmbedding(nn.Module):
    """Sinusoidal features of the timestep through a two-layer MLP, (B,) -> (B, D).

    Frequencies are 10000^(-i / (n - freq_shift)) for i < n = num_features / 2, cosines first (DDPM, Ho et al. 2020).
    Published DiT weights use freq_shift 0, diffusers' DiT uses 1.
    """

    def __init__(self, dim: int, freq_shift: int, num_features: int = 256) -> None:
        super().__init__()
        self.num_features, self.freq_shift = num_features, freq_shift
        self.fc1 = nn.Linear(num_features, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, t: Tensor) -> Tensor:
        features = sinusoids(t, self.num_features, self.freq_shift, self.fc1.weight.dtype)
        return self.fc2(F.silu(self.fc1(features)))


def sinusoids(t: Tensor, num_features: int, freq_shift: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of t at falling frequencies, (...,) -> (..., num_features), in at least float32."""
    half = num_features // 2
    exact = torch.promote_types(dtype, torch.float32)
    index = torch.arange(half, dtype=exact, device=t.device)
    angles = t.to(exact).unsqueeze(-1) * torch.exp(-math.log(10_000) / (half - freq_shift) * index)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
