"""Layers that the networks share: RMS norm, attention, feed-forward, dropout, time embedding.

Shape letters: B samples, N tokens, D width, H heads, d width of a head, K modulation vectors.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.ops.attention import AttentionBackend, attend
from megadiff.ops.backends import Backends
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


@contextlib.contextmanager
def random_stream(stream: int) -> Iterator[None]:
    """Draws inside from a side stream that is a function of the main stream's state and of `stream`.

    Stream 0 is the main stream itself. Ranks that share the main stream and differ in `stream` draw different numbers
    inside and equal numbers outside; only the main stream is state, so replaying it replays the side streams.
    """
    if stream == 0:
        yield
        return
    base = int(torch.randint(2**31, (), device="cpu"))
    with torch.random.fork_rng():
        torch.manual_seed(base * 0x1000 + stream)
        yield


class Dropout(nn.Module):
    """Dropout whose masks come from `stream` (see `random_stream`); a parallel plan sets the stream of sharded ones."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.stream = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        with random_stream(self.stream):
            return F.dropout(x, self.probability)


class AttentionDropout(Dropout):
    """The dropout of attention weights; the fused attention operators take only its probability."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("attention dropout happens inside the attention operator")


class Attention(nn.Module):
    """Multi-head self-attention, (B, N, D) -> (B, N, D).

    Queries, keys and values have weights of their own, and the number of heads is read off the projections' width, so
    the same code runs on a tensor-parallel shard that holds some of the heads.
    """

    def __init__(self, dim: int, num_heads: int, qk_norm: bool, dropout: float, backends: Backends = _DEFAULTS) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.backend: AttentionBackend = backends.attention
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.q_norm = RMSNorm(self.head_dim, backends.norm) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, backends.norm) if qk_norm else nn.Identity()
        self.dropout = AttentionDropout(dropout)
        self.out = nn.Linear(dim, dim)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, N, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_norm(self._heads(self.q(x))), self.k_norm(self._heads(self.k(x))), self._heads(self.v(x))
        dropout = self.dropout.probability if self.training else 0.0
        with random_stream(self.dropout.stream if dropout else 0):
            mixed = attend(q, k, v, dropout, self.backend)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with a tanh-approximated GELU between, (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


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

    def features(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """The sinusoids, (B,) -> (B, num_features), computed in at least float32."""
        half = self.num_features // 2
        exact = torch.promote_types(dtype, torch.float32)
        index = torch.arange(half, dtype=exact, device=t.device)
        angles = t.to(exact).unsqueeze(-1) * torch.exp(-math.log(10_000) / (half - self.freq_shift) * index)
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)

    def forward(self, t: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(self.features(t, self.fc1.weight.dtype))))
