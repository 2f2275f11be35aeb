"""Names of diffusers' `UNet2DModel` (classes or no condition) and `UNet2DConditionModel` (a text).

Upstream facts (diffusers 0.42: unets/unet_2d*.py, resnet.py, transformer_2d.py, attention.py): up_blocks count from the
coarsest level, `time_emb_proj` holds scale before shift, and the first half of a GEGLU's projection is not gated. A
class embedding there has no row for "no condition"; the last one is taken to be it.
"""

from megadiff.checkpoint.diffusers_class import DiffusersClass
from megadiff.checkpoint.diffusers_unet_json import (
    condition_json,
    read_condition_json,
    read_unet_json,
    unet_json,
)
from megadiff.checkpoint.names import NameRow, with_affine
from megadiff.config.schema import ModelConfig
from megadiff.models.unet_table import UNetLayer, unet_table


def _rows(model: ModelConfig) -> list[NameRow]:
    return [row for layer in unet_table(model) for row in _layer_rows(layer, model)]


def _layer_rows(layer: UNetLayer, model: ModelConfig) -> list[NameRow]:
    match layer.kind:
        case "embed":
            return _embed_rows(model)
        case "resnet":
            return _resnet_rows(layer, _place(layer, "resnets", model), model)
        case "attn":
            return _attention_rows(layer.name, _place(layer, "attentions", model))
        case "enter":
            theirs = _place(layer, "attentions", model)
            return [
                *with_affine(f"{layer.name}.norm", f"{theirs}.norm"),
                *with_affine(f"{layer.name}.linear", f"{theirs}.proj_in"),
            ]
        case "block":
            block = layer.name.rpartition(".")[2]
            return _block_rows(layer.name, f"{_place(layer, 'attentions', model)}.transformer_blocks.{block}")
        case "leave":
            return with_affine(f"{layer.name}.linear", f"{_place(layer, 'attentions', model)}.proj_out")
        case "down":
            return with_affine(f"{layer.name}.conv", f"{_side(layer, model)}.downsamplers.0.conv")
        case "up":
            return with_affine(f"{layer.name}.conv", f"{_side(layer, model)}.upsamplers.0.conv")
        case "head":
            return [*with_affine("head.norm", "conv_norm_out"), *with_affine("head.conv", "conv_out")]


def _side(layer: UNetLayer, model: ModelConfig) -> str:
    """The block there that a layer belongs to."""
    path, level = layer.name.split(".")[:2]
    if path == "mid":
        return "mid_block"
    number = int(level) if path == "down" else len(model.block_out_channels) - 1 - int(level)
    return f"{path}_blocks.{number}"


def _place(layer: UNetLayer, group: str, model: ModelConfig) -> str:
    return f"{_side(layer, model)}.{group}.{layer.name.split('.')[2]}"


def _embed_rows(model: ModelConfig) -> list[NameRow]:
    rows = [
        *with_affine("embed.conv", "conv_in"),
        *with_affine("embed.time.fc1", "time_embedding.linear_1"),
        *with_affine("embed.time.fc2", "time_embedding.linear_2"),
    ]
    if model.condition == "class":
        rows.append(NameRow("class_embedding.weight", ("embed.label.weight",)))
    elif model.condition == "text" and model.pooled_dim:
        rows += with_affine("embed.pooled.fc1", "add_embedding.linear_1")
        rows += with_affine("embed.pooled.fc2", "add_embedding.linear_2")
    return rows


def _resnet_rows(layer: UNetLayer, theirs: str, model: ModelConfig) -> list[NameRow]:
    ours = layer.name
    parts = ("time_scale", "time_shift") if model.resnet_time_scale_shift else ("time_shift",)
    rows = [
        *with_affine(f"{ours}.norm1", f"{theirs}.norm1"),
        *with_affine(f"{ours}.conv1", f"{theirs}.conv1"),
        *_joined(ours, parts, f"{theirs}.time_emb_proj"),
        *with_affine(f"{ours}.norm2", f"{theirs}.norm2"),
        *with_affine(f"{ours}.conv2", f"{theirs}.conv2"),
    ]
    if layer.resnet_channels != layer.out_channels:
        rows += with_affine(f"{ours}.shortcut", f"{theirs}.conv_shortcut")
    return rows


def _attention_rows(ours: str, theirs: str) -> list[NameRow]:
    return [
        *with_affine(f"{ours}.norm", f"{theirs}.group_norm"),
        *with_affine(f"{ours}.attention.q", f"{theirs}.to_q"),
        *with_affine(f"{ours}.attention.k", f"{theirs}.to_k"),
        *with_affine(f"{ours}.attention.v", f"{theirs}.to_v"),
        *with_affine(f"{ours}.attention.out", f"{theirs}.to_out.0"),
    ]


def _block_rows(ours: str, theirs: str) -> list[NameRow]:
    rows = [row for norm in ("norm1", "norm2", "norm3") for row in with_affine(f"{ours}.{norm}", f"{theirs}.{norm}")]
    for attention, name in (("self_attn", "attn1"), ("cross_attn", "attn2")):
        rows += [NameRow(f"{theirs}.{name}.to_{part}.weight", (f"{ours}.{attention}.{part}.weight",)) for part in "qkv"]
        rows += with_affine(f"{ours}.{attention}.out", f"{theirs}.{name}.to_out.0")
    return [
        *rows,
        *_joined(f"{ours}.mlp", ("fc1", "gate"), f"{theirs}.ff.net.0.proj"),
        *with_affine(f"{ours}.mlp.fc2", f"{theirs}.ff.net.2"),
    ]


def _joined(owner: str, parts: tuple[str, ...], theirs: str) -> list[NameRow]:
    """Rows of a layer there that is several of ours, one after the other."""
    return [
        NameRow(f"{theirs}.{leaf}", tuple(f"{owner}.{part}.{leaf}" for part in parts)) for leaf in ("weight", "bias")
    ]


def _objection(model: ModelConfig) -> str | None:
    if model.skip != "concat":
        return f"model.skip = {model.skip}, but skips there are always concatenated"
    if model.skip_shift:
        return "model.skip_shift = true has no counterpart there"
    if model.attention_tile_size:
        return f"model.attention_tile_size = {model.attention_tile_size}, but attention there reaches the whole picture"
    if model.resample != "conv":
        return f"model.resample = {model.resample}, but the blocks there resample by convolution"
    return None


def _condition_objection(model: ModelConfig) -> str | None:
    middle, last = model.mid_block_transformer_layers, model.transformer_layers_per_block[-1]
    if middle == 0:
        return "model.mid_block_transformer_layers = 0, but the middle there without attention is a single ResNet block"
    if last not in (0, middle):
        return (
            f"model.mid_block_transformer_layers = {middle}, but the middle there is as deep as the last level, "
            f"which has {last} layers"
        )
    if model.pooled_dim and not model.pixel_size:
        return "model.pixel_size = 0, but a pooled text there always comes with the size of the picture"
    return _objection(model)


UNET = DiffusersClass("UNet2DModel", _rows, _objection, unet_json, read_unet_json)
UNET_CONDITION = DiffusersClass(
    "UNet2DConditionModel", _rows, _condition_objection, condition_json, read_condition_json
)
