"""Which implementation of each operator a network computes with."""

from dataclasses import dataclass

from megadiff.ops.attention import AttentionBackend
from megadiff.ops.library import Kernels


@dataclass(frozen=True)
class Backends:
    """The settings `train.attention_backend` and `train.kernels`."""

    attention: AttentionBackend = "auto"
    kernels: Kernels = "auto"
