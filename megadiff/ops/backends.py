"""Which implementation of each operator a network computes with."""

from dataclasses import dataclass

from megadiff.ops.attention import AttentionBackend
from megadiff.ops.library import Kernels
from megadiff.ops.rms_norm import NormBackend


@dataclass(frozen=True)
class Backends:
    """The settings `train.attention_backend`, `train.kernels` and `train.norm_backend`."""

    attention: AttentionBackend = "auto"
    kernels: Kernels = "auto"
    norm: NormBackend = "torch"
