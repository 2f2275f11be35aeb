"""Dropout with masks from random streams that a parallel plan can tell apart."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DRAWS = 2**16  # values of a draw


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
            return F.dropout(x, self.probability) if x.is_cuda else drop(x, self.probability)


class AttentionDropout(Dropout):
    """The dropout of attention weights; the fused attention operators take only its probability."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("attention dropout happens inside the attention operator")


def drop(x: Tensor, probability: float) -> Tensor:
    """Dropout on CPU with 16 random bits an element, four elements a call of torch's serial generator.

    Takes a third of the time of `F.dropout` there, and keeps its mask as bytes where that keeps it in the dtype of x.
    The probability is rounded to a multiple of 2^-16, and the scale is that of the rounded one.
    """
    dropped = min(round(probability * _DRAWS), _DRAWS - 1)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    like_x = torch.empty_like(x, dtype=torch.int16, device="meta")  # dense, in the order of x's dims in memory
    draws = words.view(torch.int16).as_strided(like_x.shape, like_x.stride())
    return torch.where(draws >= dropped - _DRAWS // 2, x, 0.0) * (_DRAWS / (_DRAWS - dropped))
