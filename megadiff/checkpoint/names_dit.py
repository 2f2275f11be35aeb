"""Names of facebookresearch/DiT (arXiv 2212.09748): fused q, k, v position table among the weights."""

from typing import Any

from megadiff.checkpoint.names import Convention, NameRow, Origin, with_affine
from megadiff.config.schema import ModelConfig
from megadiff.errors import CheckpointError

POSITION_TABLE = "pos_embed"

# Heads cannot be read off the weights; these are the published sizes S, B, L and XL (table 1 of the paper).
_PUBLISHED_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}


def _block_rows(index: int) -> list[NameRow]:
    name = f"blocks.{index}"
    fused = [
        NameRow(f"{name}.attn.qkv.{leaf}", tuple(f"{name}.attn.{part}.{leaf}" for part in "qkv"))
        for leaf in ("weight", "bias")
    ]
    return [
        *fused,
        *with_affine(f"{name}.attn.out", f"{name}.attn.proj"),
        *with_affine(f"{name}.mlp.fc1", f"{name}.mlp.fc1"),
        *with_affine(f"{name}.mlp.fc2", f"{name}.mlp.fc2"),
        *with_affine(f"{name}.modulation", f"{name}.adaLN_modulation.1"),
    ]


def _rows(model: ModelConfig) -> list[NameRow]:
    blocks = [row for index in range(model.num_layers) for row in _block_rows(index)]
    return [
        NameRow(POSITION_TABLE, ()),
        *with_affine("embed.patch", "x_embedder.proj"),
        *with_affine("embed.time.fc1", "t_embedder.mlp.0"),
        *with_affine("embed.time.fc2", "t_embedder.mlp.2"),
        NameRow("y_embedder.embedding_table.weight", ("embed.label.weight",)),
        *blocks,
        *with_affine("head.modulation", "final_layer.adaLN_modulation.1"),
        *with_affine("head.out", "final_layer.linear"),
    ]


def no_dit_counterpart(model: ModelConfig) -> str | None:
    """The first setting of a network that no published DiT code knows, as a sentence, or None."""
    if model.qk_norm:
        return "model.qk_norm = true has no counterpart there"
    if model.long_skips:
        return "model.long_skips = true has no counterpart there"
    if model.attention_tile_size:
        return f"model.attention_tile_size = {model.attention_tile_size}, but attention there reaches the whole picture"
    if model.position_size not in (0, model.input_size):
        return f"model.position_size = {model.position_size}, but its positions are those of input_size"
    return None


def _objection(model: ModelConfig) -> str | None:
    if model.name != "dit":
        return f"model.name = {model.name}, but facebookresearch/DiT holds only DiTs"
    if (reason := no_dit_counterpart(model)) is not None:
        return reason
    if model.time_freq_shift != 0:
        return f"model.time_freq_shift = {model.time_freq_shift}, but facebookresearch/DiT always uses 0"
    return None


def _config_json(model: ModelConfig) -> dict[str, Any] | None:
    return None


def _read_model(origin: Origin) -> ModelConfig:
    hidden_size, in_channels, patch_size, _ = origin.shape("x_embedder.proj.weight", 4)
    side = round(origin.shape(POSITION_TABLE, 3)[1] ** 0.5)
    outputs = origin.shape("final_layer.linear.weight", 2)[0]
    return ModelConfig(
        input_size=side * patch_size,
        in_channels=in_channels,
        patch_size=patch_size,
        hidden_size=hidden_size,
        num_layers=len([name for name in origin.shapes if name.endswith(".attn.qkv.weight")]),
        num_heads=_num_heads(origin, hidden_size),
        mlp_ratio=origin.shape("blocks.0.mlp.fc1.weight", 2)[0] / hidden_size,
        num_classes=origin.shape("y_embedder.embedding_table.weight", 2)[0] - 1,
        learn_sigma=outputs == 2 * in_channels * patch_size**2,
        time_freq_shift=0,
    )


def _num_heads(origin: Origin, hidden_size: int) -> int:
    if origin.num_heads is not None:
        return origin.num_heads
    if origin.expected is not None:
        return origin.expected.num_heads
    if "model" in origin.metadata:
        return ModelConfig.model_validate_json(origin.metadata["model"]).num_heads
    if hidden_size in _PUBLISHED_HEADS:
        return _PUBLISHED_HEADS[hidden_size]
    raise CheckpointError(
        f"the number of heads cannot be read off weights of width {hidden_size}; give it with --num-heads"
    )


FACEBOOKRESEARCH = Convention("facebookresearch", "model", _rows, _objection, _config_json, _read_model)
