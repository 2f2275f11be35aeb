"""What the settings of a network say about its layers, in closed form: no network is built."""

from math import sqrt

from megadiff.config.schema import Config, ModelConfig

# The settings that only one network reads; ModelConfig lists those of every network before them.
FIELDS_OF_NETWORK: dict[str, tuple[str, ...]] = {
    "dit": (
        "patch_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "mlp_ratio",
        "qk_norm",
        "long_skips",
        "position_size",
    ),
    "unet": (
        "condition",
        "block_out_channels",
        "layers_per_block",
        "transformer_layers_per_block",
        "mid_block_transformer_layers",
        "attention_head_dim",
        "cross_attention_dim",
        "text_length",
        "pooled_dim",
        "pixel_size",
        "norm_num_groups",
        "norm_eps",
        "resample",
        "resnet_time_scale_shift",
        "skip",
        "skip_shift",
        "skip_shift_strength",
    ),
}


def attention_levels(model: ModelConfig) -> list[int]:
    """The levels of a UNet whose feature maps attend; the middle counts as the last."""
    depths, last = model.transformer_layers_per_block, len(model.block_out_channels) - 1
    return [
        level for level, depth in enumerate(depths) if depth or (level == last and model.mid_block_transformer_layers)
    ]


def attention_sides(model: ModelConfig) -> list[int]:
    """Tokens a side of each square map that attends to itself, from the finest."""
    if model.name == "dit":
        return [model.input_size // model.patch_size]
    return [model.input_size >> level for level in attention_levels(model)]


def deciding_blocks(model: ModelConfig) -> int:
    """How many first blocks of a DiT always run where features are reused, and decide for the others."""
    return max(1, model.num_layers // 6)


def cached_level(model: ModelConfig) -> int:
    """The level of a UNet, from 0, that is reused with all that lies within it: the third, or the last of fewer."""
    return min(3, len(model.block_out_channels)) - 1


def schedule_shift(config: Config) -> float:
    """What alpha / sigma is divided by: diffusion.shift, or sqrt(tokens / base tokens) (Esser et al. 2024, eq. 23).

    The tokens of a UNet are the pixels (or latents) of its input.
    """
    model, base = config.model, config.diffusion.shift_base_tokens
    if base == 0:
        return config.diffusion.shift
    side = model.input_size // model.patch_size if model.name == "dit" else model.input_size
    return side / sqrt(base)


def num_chain_layers(model: ModelConfig) -> int:
    """How many layers the network has for pipeline stages to share."""
    ends = 2  # the first and the last layer
    if model.name == "dit":
        return model.num_layers + ends
    resamples = 2 * (len(model.block_out_channels) - 1)
    middle = _unit_layers(model, model.mid_block_transformer_layers) + 1
    # The way up has one unit a level more than the way down.
    units = 2 * model.layers_per_block + 1
    levels = sum(units * _unit_layers(model, depth) for depth in model.transformer_layers_per_block)
    return ends + resamples + middle + levels


def _unit_layers(model: ModelConfig, depth: int) -> int:
    """A ResNet block and what attends after it: one layer, or a transformer between its first and its last layer."""
    if depth == 0:
        return 1
    return 3 + depth if model.condition == "text" else 2


def has_long_skips(model: ModelConfig) -> bool:
    """Whether layers of the network's second half read the output of layers of the first half."""
    return model.long_skips or model.name == "unet"


def is_folded(config: Config) -> bool:
    """Whether the pipeline is folded: where asked for, and by default for a network with long skips."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size == 1 or parallel.pipeline_schedule == "1f1b":
        return False
    return parallel.pipeline_schedule == "folded" or has_long_skips(config.model)
