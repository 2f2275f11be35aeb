"""Analytic floating-point operations of a network: two for each multiply-add of matrix products and attention."""

from megadiff.config.schema import ModelConfig
from megadiff.models.dit import output_channels


def layer_flops(model: ModelConfig) -> dict[str, int]:
    """Forward operations for one sample, by layer of the chain."""
    width, tokens = model.hidden_size, (model.input_size // model.patch_size) ** 2
    patch_values = model.patch_size**2
    hidden = int(width * model.mlp_ratio)
    embed = 2 * tokens * width * patch_values * model.in_channels + 2 * (256 * width + width * width)
    projections = 2 * tokens * 4 * width * width
    attention = 2 * 2 * tokens * tokens * width
    feed_forward = 2 * tokens * 2 * width * hidden
    block = projections + attention + feed_forward + 2 * width * 6 * width
    head = 2 * tokens * width * patch_values * output_channels(model) + 2 * width * 2 * width
    return {"embed": embed} | {f"blocks.{i}": block for i in range(model.num_layers)} | {"head": head}


def training_flops(model: ModelConfig) -> int:
    """Operations of one training sample: forward plus twice as many backward. Recomputation is not counted."""
    return 3 * sum(layer_flops(model).values())
