"""megadiff: 3D-parallel training of diffusion models on DeepSpeed."""

__version__ = "0.1.0"
