"""Networks as plain PyTorch chains. Knows no ranks, process groups or environment variables."""

from megadiff.models.build import build_network, chain_builders, materialize

__all__ = ["build_network", "chain_builders", "materialize"]
