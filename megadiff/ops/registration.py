"""The compiled operators, each told to torch (shapes, gradients) by its own module."""

from megadiff.ops import ada_layer_norm, adamw_ema, diffuse, group_norm_silu, solver_step, weighted_mse

_MODULES = (ada_layer_norm, adamw_ema, diffuse, group_norm_silu, solver_step, weighted_mse)


def register(library: str) -> None:
    """Registers fakes and gradients for the operators of `torch.ops.<library>`, whose schemas are loaded."""
    for module in _MODULES:
        module.register(library)
