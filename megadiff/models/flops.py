"""Analytic floating-point operations of a network: two for each multiply-add of a product, convolution or attention."""

from collections.abc import Callable, Mapping

from megadiff.config.schema import ModelConfig
from megadiff.models.dit import dit_skips
from megadiff.models.sizes import output_channels
from megadiff.models.unet_table import UNetLayer, time_channels, unet_table


def layer_flops(model: ModelConfig) -> dict[str, int]:
    """Forward operations for one sample, by layer of the chain."""
    return _LAYER_FLOPS[model.name](model)


def training_flops(model: ModelConfig) -> int:
    """Operations of one training sample: forward plus twice as many backward. Recomputation is not counted."""
    return 3 * sum(layer_flops(model).values())


def _dit_flops(model: ModelConfig) -> dict[str, int]:
    width, tokens = model.hidden_size, (model.input_size // model.patch_size) ** 2
    patch_values = model.patch_size**2
    hidden = int(width * model.mlp_ratio)
    embed = 2 * tokens * width * patch_values * model.in_channels + 2 * (256 * width + width * width)
    attention = 2 * tokens * 4 * width * width + _attention_flops(model, tokens, tokens, width)
    feed_forward = 2 * tokens * 2 * width * hidden
    block = attention + feed_forward + 2 * width * 6 * width
    merge = 2 * tokens * 2 * width * width
    skips = dit_skips(model)
    blocks = [f"blocks.{i}" for i in range(model.num_layers)]
    head = 2 * tokens * width * patch_values * output_channels(model) + 2 * width * 2 * width
    return {"embed": embed} | {name: block + (name in skips) * merge for name in blocks} | {"head": head}


def _attention_flops(model: ModelConfig, tokens: int, sources: int, width: int) -> int:
    """The two products of attention weights, of self-attention within tiles where there are any."""
    tile = model.attention_tile_size**2
    return 2 * 2 * tokens * (min(sources, tile) if tile else sources) * width


def _unet_flops(model: ModelConfig) -> dict[str, int]:
    return {layer.name: _UNET_FLOPS[layer.kind](model, layer) for layer in unet_table(model)}


def _conv(side: int, inputs: int, outputs: int, kernel: int = 3) -> int:
    return 2 * side * side * inputs * outputs * kernel * kernel


def _embed(model: ModelConfig, layer: UNetLayer) -> int:
    width, time = layer.out_channels, time_channels(model)
    total = _conv(layer.side, layer.in_channels, width) + 2 * (width * time + time * time)
    if model.condition == "text" and model.pooled_dim:
        features = model.pooled_dim + (6 * 256 if model.pixel_size else 0)
        total += 2 * (features * time + time * time)
    return total


def _resnet(model: ModelConfig, layer: UNetLayer) -> int:
    inputs, outputs = layer.in_channels if model.skip == "gated" else layer.resnet_channels, layer.out_channels
    vectors = 2 if model.resnet_time_scale_shift else 1
    total = _conv(layer.side, inputs + outputs, outputs) + 2 * time_channels(model) * vectors * outputs
    if inputs != outputs:
        total += _conv(layer.side, inputs, outputs, kernel=1)
    return total + (_junction(model, layer) if layer.skip_from else 0)


def _junction(model: ModelConfig, layer: UNetLayer) -> int:
    width, skip = layer.in_channels, layer.skip_channels
    total = 2 * time_channels(model) * skip if model.skip_shift else 0
    if model.skip == "gated":
        total += _conv(layer.side, width, width, kernel=1)
        total += _conv(layer.side, skip, width, kernel=1) if skip != width else 0
    return total


def _self_attention(model: ModelConfig, layer: UNetLayer) -> int:
    tokens, width = layer.side**2, layer.out_channels
    return 2 * tokens * 4 * width * width + _attention_flops(model, tokens, tokens, width)


def _block(model: ModelConfig, layer: UNetLayer) -> int:
    tokens, width, length = layer.side**2, layer.out_channels, model.text_length
    cross = 2 * (tokens * 2 * width * width + length * 2 * width * model.cross_attention_dim)
    cross += 2 * 2 * tokens * length * width
    feed_forward = 2 * tokens * 3 * width * 4 * width
    return _self_attention(model, layer) + cross + feed_forward


def _linear(model: ModelConfig, layer: UNetLayer) -> int:
    return _conv(layer.side, layer.in_channels, layer.out_channels, kernel=1)


def _down(model: ModelConfig, layer: UNetLayer) -> int:
    return _conv(layer.side // 2, layer.in_channels, layer.out_channels) if model.resample == "conv" else 0


def _up(model: ModelConfig, layer: UNetLayer) -> int:
    return _conv(2 * layer.side, layer.in_channels, layer.out_channels) if model.resample == "conv" else 0


def _head(model: ModelConfig, layer: UNetLayer) -> int:
    return _conv(layer.side, layer.in_channels, layer.out_channels)


_UNET_FLOPS: Mapping[str, Callable[[ModelConfig, UNetLayer], int]] = {
    "embed": _embed,
    "resnet": _resnet,
    "attn": _self_attention,
    "enter": _linear,
    "block": _block,
    "leave": _linear,
    "down": _down,
    "up": _up,
    "head": _head,
}
_LAYER_FLOPS: Mapping[str, Callable[[ModelConfig], dict[str, int]]] = {"dit": _dit_flops, "unet": _unet_flops}
