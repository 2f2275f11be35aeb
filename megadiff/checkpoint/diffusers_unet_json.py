"""From a network to the config.json of a diffusers UNet, and back."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from megadiff.checkpoint.diffusers_class import learns_sigma
from megadiff.checkpoint.diffusers_unet_schema import UNet2DConditionModelJson, UNet2DModelJson, UNetJson
from megadiff.checkpoint.names import Origin
from megadiff.config.schema import ModelConfig
from megadiff.errors import CheckpointError
from megadiff.models.sizes import output_channels
from megadiff.models.unet import SIZE_FEATURES, SIZE_NUMBERS
from megadiff.models.unet_table import time_channels

# What diffusers' EMAModel adds to the config.json of averaged weights.
_EMA_KEYS = {"decay", "inv_gamma", "min_decay", "optimization_step", "power", "update_after_step", "use_ema_warmup"}
_PIXELS_PER_LATENT = 8
_DEFAULT = ModelConfig()


_Json = TypeVar("_Json", bound=UNetJson)


def unet_json(model: ModelConfig) -> dict[str, Any]:
    """What UNet2DModel's config.json says of a network with classes or without a condition."""
    return _dump(
        UNet2DModelJson(
            **_shared_values(model),
            down_block_types=_block_types(model, "Attn", "Down"),
            up_block_types=_block_types(model, "Attn", "Up")[::-1],
            attention_head_dim=model.attention_head_dim,
            attn_norm_num_groups=model.norm_num_groups,
            add_attention=model.mid_block_transformer_layers > 0,
            num_class_embeds=model.num_classes + 1 if model.condition == "class" else None,
        )
    )


def condition_json(model: ModelConfig) -> dict[str, Any]:
    """What UNet2DConditionModel's config.json says of a network with texts."""
    depths = [depth or 1 for depth in model.transformer_layers_per_block]
    depths[-1] = model.mid_block_transformer_layers
    pooled: dict[str, Any] = {}
    if model.pooled_dim:
        width = model.pooled_dim + SIZE_NUMBERS * SIZE_FEATURES
        pooled = {"addition_time_embed_dim": SIZE_FEATURES, "projection_class_embeddings_input_dim": width}
        pooled["addition_embed_type"] = "text_time"
    return _dump(
        UNet2DConditionModelJson(
            **_shared_values(model),
            down_block_types=_block_types(model, "CrossAttn", "Down"),
            up_block_types=_block_types(model, "CrossAttn", "Up")[::-1],
            cross_attention_dim=model.cross_attention_dim,
            transformer_layers_per_block=tuple(depths),
            attention_head_dim=tuple(width // model.attention_head_dim for width in model.block_out_channels),
            use_linear_projection=True,
            **pooled,
        )
    )


def _dump(content: UNetJson) -> dict[str, Any]:
    return content.model_dump(mode="json")


def _shared_values(model: ModelConfig) -> dict[str, Any]:
    return {
        "sample_size": model.input_size,
        "freq_shift": model.time_freq_shift,
        "block_out_channels": model.block_out_channels,
        "layers_per_block": model.layers_per_block,
        "norm_num_groups": model.norm_num_groups,
        "norm_eps": model.norm_eps,
        "resnet_time_scale_shift": "scale_shift" if model.resnet_time_scale_shift else "default",
        "in_channels": model.in_channels,
        "out_channels": output_channels(model),
    }


def _block_types(model: ModelConfig, attention: str, path: str) -> tuple[Any, ...]:
    """Names of the blocks of all levels, from the finest."""
    return tuple(f"{attention if depth else ''}{path}Block2D" for depth in model.transformer_layers_per_block)


def read_unet_json(config: Mapping[str, Any], origin: Origin) -> ModelConfig:
    """The network that a config.json of UNet2DModel describes.

    Raises:
        CheckpointError: an option that our UNet cannot hold.
    """
    content = _parse(UNet2DModelJson, config)
    depths = _level_flags(content.down_block_types, content.up_block_types, content.block_out_channels)
    model = _read_shared(content, content.in_channels, content.out_channels) | {
        "condition": "none" if content.num_class_embeds is None else "class",
        "transformer_layers_per_block": depths,
        "mid_block_transformer_layers": int(content.add_attention),
    }
    if content.num_class_embeds is not None:
        model["num_classes"] = content.num_class_embeds - 1
    widths = [width for width, depth in zip(content.block_out_channels, depths, strict=True) if depth]
    widths += content.block_out_channels[-1:] if content.add_attention else ()
    if widths:
        sizes = {width if content.attention_head_dim is None else content.attention_head_dim for width in widths}
        model["attention_head_dim"] = _only(sizes, "attention_head_dim", content.attention_head_dim)
    _check_attention_norm(content)
    return ModelConfig(**model)


def _check_attention_norm(content: UNet2DModelJson) -> None:
    """Without `attn_norm_num_groups` the middle there has no norm where the blocks are scaled by the timestep."""
    groups = content.attn_norm_num_groups
    if groups is None and content.resnet_time_scale_shift == "default":
        groups = content.norm_num_groups
    if content.add_attention and groups != content.norm_num_groups:
        raise CheckpointError(
            f"config.json has attn_norm_num_groups = {content.attn_norm_num_groups!r}; only norm_num_groups = "
            f"{content.norm_num_groups} can be imported"
        )


def read_condition_json(config: Mapping[str, Any], origin: Origin) -> ModelConfig:
    """The network that a config.json of UNet2DConditionModel describes; what it does not tell is SDXL's or expected.

    Raises:
        CheckpointError: an option that our UNet cannot hold.
    """
    content = _parse(UNet2DConditionModelJson, config)
    widths = content.block_out_channels
    flags = _level_flags(content.down_block_types, content.up_block_types, widths)
    depths = _each(content.transformer_layers_per_block, widths, "transformer_layers_per_block")
    heads = _each(content.attention_head_dim, widths, "attention_head_dim")
    attending = {*(level for level, flag in enumerate(flags) if flag), len(widths) - 1}
    if any(widths[level] % heads[level] for level in attending):
        raise CheckpointError(f"config.json has {list(heads)} heads, which do not divide {list(widths)} channels")
    sizes = {widths[level] // heads[level] for level in attending}
    told = origin.expected if origin.expected is not None and origin.expected.condition == "text" else None
    model = _read_shared(content, content.in_channels, content.out_channels) | {
        "condition": "text",
        "transformer_layers_per_block": tuple(flag * depth for flag, depth in zip(flags, depths, strict=True)),
        "mid_block_transformer_layers": depths[-1],
        "attention_head_dim": _only(sizes, "attention_head_dim", list(heads)),
        "cross_attention_dim": content.cross_attention_dim,
        "text_length": told.text_length if told else _DEFAULT.text_length,
    }
    if content.addition_embed_type is not None:
        model["pooled_dim"] = _pooled_dim(content)
        model["pixel_size"] = told.pixel_size if told else _PIXELS_PER_LATENT * content.sample_size
    return ModelConfig(**model)


def _pooled_dim(content: UNet2DConditionModelJson) -> int:
    width, features = content.projection_class_embeddings_input_dim, content.addition_time_embed_dim
    if width is None or features != SIZE_FEATURES or width <= SIZE_NUMBERS * SIZE_FEATURES:
        raise CheckpointError(
            f"config.json has addition_time_embed_dim = {features!r} and projection_class_embeddings_input_dim = "
            f"{width!r}; only {SIZE_FEATURES} and more than {SIZE_NUMBERS * SIZE_FEATURES} can be imported"
        )
    return width - SIZE_NUMBERS * SIZE_FEATURES


def _parse(schema: type[_Json], config: Mapping[str, Any]) -> _Json:
    told = {key: value for key, value in config.items() if not key.startswith("_") and key not in _EMA_KEYS}
    try:
        return schema(**told)
    except ValidationError as error:
        first = error.errors()[0]
        key, message = first["loc"][0], first["msg"].removeprefix("Input should be ")
        if first["type"] == "missing":
            raise CheckpointError(f"config.json lacks {key}, without which this UNet cannot be imported") from error
        if first["type"] == "extra_forbidden":
            raise CheckpointError(f"config.json has {key} = {told[str(key)]!r}, which is not known here") from error
        raise CheckpointError(
            f"config.json has {key} = {told[str(key)]!r}, which this UNet cannot hold; needed is {message}"
        ) from error


def _read_shared(content: UNetJson, in_channels: int, out_channels: int) -> dict[str, Any]:
    model = {
        "name": "unet",
        "input_size": content.sample_size,
        "in_channels": in_channels,
        "learn_sigma": learns_sigma(in_channels, out_channels),
        "time_freq_shift": content.freq_shift,
        "dropout": content.dropout,
        "block_out_channels": content.block_out_channels,
        "layers_per_block": content.layers_per_block,
        "norm_num_groups": content.norm_num_groups,
        "norm_eps": content.norm_eps,
        "resnet_time_scale_shift": content.resnet_time_scale_shift == "scale_shift",
    }
    width = time_channels(ModelConfig(name="unet", block_out_channels=content.block_out_channels))
    if content.time_embedding_dim not in (None, width):
        raise CheckpointError(f"config.json has time_embedding_dim = {content.time_embedding_dim}; needed is {width}")
    return model


def _level_flags(down: tuple[str, ...], up: tuple[str, ...], widths: tuple[int, ...]) -> tuple[int, ...]:
    """1 for each level that attends, from the finest."""
    flags = tuple(int("Attn" in name) for name in down)
    if len(down) != len(widths) or flags != tuple(int("Attn" in name) for name in reversed(up)):
        raise CheckpointError(
            f"config.json has down_block_types = {list(down)} and up_block_types = {list(up)} for {len(widths)} "
            "levels; only a way up that mirrors the way down can be imported"
        )
    return flags


def _each(value: int | tuple[int, ...], widths: tuple[int, ...], key: str) -> tuple[int, ...]:
    values = (value,) * len(widths) if isinstance(value, int) else value
    if len(values) != len(widths):
        raise CheckpointError(f"config.json has {key} = {list(values)}, but {len(widths)} levels")
    return values


def _only(sizes: set[int], key: str, shown: object) -> int:
    if len(sizes) > 1:
        raise CheckpointError(
            f"config.json has {key} = {shown!r}, which makes heads of {sorted(sizes)} channels; only one size for all "
            "levels can be imported"
        )
    return sizes.pop()
