"""Networks as plain PyTorch chains. Knows no ranks, process groups or environment variables."""

from megadiff.models.build import (
    FUSED_OPERATORS,
    build_network,
    chain_builders,
    long_skips,
    materialize,
    meta_chain,
)

__all__ = ["FUSED_OPERATORS", "build_network", "chain_builders", "long_skips", "materialize", "meta_chain"]
