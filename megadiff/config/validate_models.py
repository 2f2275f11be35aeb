"""Rules between the settings of a network. Each check raises one sentence with values and remedy."""

from math import gcd

from megadiff.config.checks import Check, Idle, choices, divisors, refuse_idle
from megadiff.config.networks import FIELDS_OF_NETWORK, attention_levels, attention_sides
from megadiff.config.schema import Config
from megadiff.errors import ConfigError

# Sources of pictures whose samples have a class and no text.
_WITHOUT_TEXT = ("emoji", "fashion_mnist", "image_folder")
_SHOWN_HEAD_DIMS = 128
_SHOWN_GROUPS = 64
_SHOWN_TILES = 64


def _settings_of_this_network(config: Config) -> None:
    own = config.model.name
    refuse_idle(
        config,
        [
            Idle("model", name, network != own, f"model.name = {own}; remove it, or use model.name = {network}")
            for network, names in FIELDS_OF_NETWORK.items()
            for name in names
        ],
    )


def _tiles_divide_maps(config: Config) -> None:
    tile, sides = config.model.attention_tile_size, attention_sides(config.model)
    if not tile or not sides:
        return
    if tile >= max(sides):
        raise ConfigError(
            f"model.attention_tile_size = {tile} has no effect, because the largest map that attends has {max(sides)} "
            f"tokens a side; use less than {max(sides)}, or 0 for no tiles"
        )
    if any(side > tile and side % tile for side in sides):
        fitting = (
            number
            for number in range(1, min(max(sides), _SHOWN_TILES + 1))
            if all(side <= number or side % number == 0 for side in sides)
        )
        raise ConfigError(
            f"model.attention_tile_size = {tile} does not divide the maps that attend, with {choices(sides)} tokens a "
            f"side; use {choices(fitting)}"
        )


def _patch_divides_input(config: Config) -> None:
    size, patch = config.model.input_size, config.model.patch_size
    if size % patch:
        raise ConfigError(f"model.patch_size = {patch} does not divide model.input_size = {size}; use {divisors(size)}")


def _heads_divide_hidden(config: Config) -> None:
    hidden, heads = config.model.hidden_size, config.model.num_heads
    if hidden % heads:
        raise ConfigError(
            f"model.num_heads = {heads} does not divide model.hidden_size = {hidden}; use {divisors(hidden, 64)}"
        )


def _hidden_fits_positions(config: Config) -> None:
    hidden = config.model.hidden_size
    if hidden % 4:
        near = hidden + 4 - hidden % 4
        raise ConfigError(
            f"model.hidden_size = {hidden} is not a multiple of 4, which the 2D sine-cosine positions need (sine and "
            f"cosine of row and column); use {near}"
        )


def _positions_cover_whole_tokens(config: Config) -> None:
    position, patch = config.model.position_size, config.model.patch_size
    if position % patch:
        below = position // patch * patch
        raise ConfigError(
            f"model.position_size = {position} is not a multiple of model.patch_size = {patch}; use "
            f"{below or patch} or {below + patch}, or 0 for model.input_size"
        )


def _mlp_width_is_whole(config: Config) -> None:
    width = config.model.hidden_size * config.model.mlp_ratio
    if width != int(width) or width < 1:
        raise ConfigError(
            f"model.mlp_ratio = {config.model.mlp_ratio} x model.hidden_size = {config.model.hidden_size} gives "
            f"{width} hidden features, which is not a whole number; use mlp_ratio = 4.0"
        )


def _levels_have_depths(config: Config) -> None:
    widths, depths = config.model.block_out_channels, config.model.transformer_layers_per_block
    if len(widths) != len(depths):
        raise ConfigError(
            f"model.transformer_layers_per_block = {list(depths)} has {len(depths)} entries for the {len(widths)} "
            f"levels of model.block_out_channels = {list(widths)}; give one per level"
        )


def _first_level_fits_timesteps(config: Config) -> None:
    width = config.model.block_out_channels[0]
    if width % 2 or width < 4:
        raise ConfigError(
            f"model.block_out_channels[0] = {width} is no even number from 4 on, which the sines and cosines of the "
            f"timestep need; use {max(4, width + 1)}"
        )


def _groups_divide_channels(config: Config) -> None:
    widths, groups = config.model.block_out_channels, config.model.norm_num_groups
    if gcd(*widths) % groups:
        raise ConfigError(
            f"model.norm_num_groups = {groups} does not divide all of model.block_out_channels = {list(widths)}; use "
            f"{divisors(gcd(*widths), _SHOWN_GROUPS)}"
        )


def _levels_divide_input(config: Config) -> None:
    size, levels = config.model.input_size, len(config.model.block_out_channels)
    factor = 2 ** (levels - 1)
    if size % factor:
        below = size // factor * factor
        raise ConfigError(
            f"model.input_size = {size} is not a multiple of {factor}, which the {levels} levels of "
            f"model.block_out_channels need; use {f'{below} or ' if below else ''}{below + factor}"
        )


def _head_dim_divides_channels(config: Config) -> None:
    model = config.model
    widths = {model.block_out_channels[level] for level in attention_levels(model)}
    if gcd(*widths) % model.attention_head_dim:
        channels, fitting = choices(sorted(widths)), divisors(gcd(*widths), _SHOWN_HEAD_DIMS)
        raise ConfigError(
            f"model.attention_head_dim = {model.attention_head_dim} does not divide the {channels} channels of the "
            f"levels that attend; use {fitting}"
        )


def _attention_is_one_layer(config: Config) -> None:
    model = config.model
    depths = (*model.transformer_layers_per_block, model.mid_block_transformer_layers)
    if model.condition != "text" and max(depths) > 1:
        raise ConfigError(
            f"model.transformer_layers_per_block = {list(depths[:-1])} with model.mid_block_transformer_layers = "
            f"{depths[-1]} has no effect beyond 1, because attention is one layer with model.condition = "
            f"{model.condition}; use 0 and 1"
        )


def _text_is_read(config: Config) -> None:
    model = config.model
    if model.condition == "text" and not attention_levels(model):
        raise ConfigError(
            "model.condition = text is read by attention, but model.transformer_layers_per_block = "
            f"{list(model.transformer_layers_per_block)} and model.mid_block_transformer_layers = 0; use 1 or more "
            "at a level"
        )


def _text_comes_with_data(config: Config) -> None:
    name = config.data.name
    if config.model.condition == "text" and name in _WITHOUT_TEXT:
        raise ConfigError(
            f"model.condition = text needs texts, but data.name = {name} has classes; use data.name = latents with "
            "data.path, or model.condition = class"
        )


def _guidance_needs_a_condition(config: Config) -> None:
    guidance = config.sampling.guidance
    if config.model.condition == "none" and guidance != 1:
        raise ConfigError(
            f"sampling.guidance = {guidance} weighs answers with and without a condition, but model.condition = none; "
            "use sampling.guidance = 1.0"
        )


def _no_idle_unet_settings(config: Config) -> None:
    model = config.model
    no_text = f"model.condition = {model.condition}; remove it, or use model.condition = text"
    no_attention = "a UNet without attention; remove it, or use model.mid_block_transformer_layers = 1"
    texts = ("cross_attention_dim", "text_length", "pooled_dim", "pixel_size")
    attention = ("attention_head_dim", "attention_dropout", "attention_tile_size")
    refuse_idle(
        config,
        (
            *(Idle("model", name, model.condition != "text", no_text) for name in texts),
            *(Idle("model", name, not attention_levels(model), no_attention) for name in attention),
            Idle("model", "pixel_size", not model.pooled_dim, "model.pooled_dim = 0; remove it, or use pooled_dim"),
            Idle(
                "model",
                "skip_shift_strength",
                not model.skip_shift,
                "model.skip_shift = false; remove it, or use skip_shift = true",
            ),
            Idle("diffusion", "condition_dropout", model.condition == "none", "model.condition = none; remove it"),
        ),
    )


MODEL_CHECKS: dict[str, tuple[Check, ...]] = {
    "dit": (
        _settings_of_this_network,
        _patch_divides_input,
        _heads_divide_hidden,
        _hidden_fits_positions,
        _mlp_width_is_whole,
        _positions_cover_whole_tokens,
        _tiles_divide_maps,
    ),
    "unet": (
        _settings_of_this_network,
        _levels_have_depths,
        _first_level_fits_timesteps,
        _groups_divide_channels,
        _levels_divide_input,
        _text_is_read,
        _head_dim_divides_channels,
        _attention_is_one_layer,
        _text_comes_with_data,
        _guidance_needs_a_condition,
        _no_idle_unet_settings,
        _tiles_divide_maps,
    ),
}
