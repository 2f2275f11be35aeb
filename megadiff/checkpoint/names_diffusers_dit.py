"""Names and config.json of diffusers' `DiTTransformer2DModel`.

Upstream facts (diffusers 0.42: transformers/dit_transformer_2d.py, embeddings.py, attention.py): every block
holds its own copy of the time and label embedder, frequencies use downscale_freq_shift = 1, feed-forwards are
four times as wide, and `norm_eps` reaches only the second LayerNorm of a block, the others having 1e-6.
"""

from collections.abc import Mapping
from typing import Any

from megadiff.checkpoint.diffusers_class import DiffusersClass, learns_sigma
from megadiff.checkpoint.names import NameRow, Origin, with_affine
from megadiff.checkpoint.names_dit import no_dit_counterpart
from megadiff.config.schema import ModelConfig
from megadiff.errors import CheckpointError
from megadiff.models.layers import NORM_EPS
from megadiff.models.sizes import output_channels

_CLASS_NAME = "DiTTransformer2DModel"
_MLP_RATIO = 4.0
# What the architecture needs these to be; absent means diffusers' own default, which is the same.
_FIXED: Mapping[str, Any] = {
    "norm_type": "ada_norm_zero",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
}
_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": None,
    "num_layers": 28,
    "dropout": 0.0,
    "sample_size": 32,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
    "norm_eps": 1e-5,
}


def _embedder_rows(block: str) -> list[NameRow]:
    embedder = f"{block}.norm1.emb"
    return [
        *with_affine("embed.time.fc1", f"{embedder}.timestep_embedder.linear_1"),
        *with_affine("embed.time.fc2", f"{embedder}.timestep_embedder.linear_2"),
        NameRow(f"{embedder}.class_embedder.embedding_table.weight", ("embed.label.weight",)),
    ]


def _block_rows(index: int) -> list[NameRow]:
    ours, theirs = f"blocks.{index}", f"transformer_blocks.{index}"
    return [
        *_embedder_rows(theirs),
        *with_affine(f"{ours}.modulation", f"{theirs}.norm1.linear"),
        *with_affine(f"{ours}.attn.q", f"{theirs}.attn1.to_q"),
        *with_affine(f"{ours}.attn.k", f"{theirs}.attn1.to_k"),
        *with_affine(f"{ours}.attn.v", f"{theirs}.attn1.to_v"),
        *with_affine(f"{ours}.attn.out", f"{theirs}.attn1.to_out.0"),
        *with_affine(f"{ours}.mlp.fc1", f"{theirs}.ff.net.0.proj"),
        *with_affine(f"{ours}.mlp.fc2", f"{theirs}.ff.net.2"),
    ]


def _rows(model: ModelConfig) -> list[NameRow]:
    blocks = [row for index in range(model.num_layers) for row in _block_rows(index)]
    return [
        *with_affine("embed.patch", "pos_embed.proj"),
        *blocks,
        *with_affine("head.modulation", "proj_out_1"),
        *with_affine("head.out", "proj_out_2"),
    ]


def _objection(model: ModelConfig) -> str | None:
    if (reason := no_dit_counterpart(model)) is not None:
        return reason
    if model.time_freq_shift != 1:
        return f"model.time_freq_shift = {model.time_freq_shift}, but {_CLASS_NAME} always uses 1"
    if model.mlp_ratio != _MLP_RATIO:
        return f"model.mlp_ratio = {model.mlp_ratio}, but {_CLASS_NAME} always uses {_MLP_RATIO}"
    return None


def _config_json(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_attention_heads": model.num_heads,
        "attention_head_dim": model.hidden_size // model.num_heads,
        "in_channels": model.in_channels,
        "out_channels": output_channels(model),
        "num_layers": model.num_layers,
        "dropout": 0.0,
        "sample_size": model.input_size,
        "patch_size": model.patch_size,
        "num_embeds_ada_norm": model.num_classes,
        "norm_eps": NORM_EPS,
        **_FIXED,
    }


def _read_model(config: Mapping[str, Any], origin: Origin) -> ModelConfig:
    values = {**_DEFAULTS, **_FIXED, **config}
    for key, needed in _FIXED.items():
        if values[key] != needed:
            raise CheckpointError(f"config.json has {key} = {values[key]!r}; only {needed!r} can be imported")
    if values["norm_eps"] != NORM_EPS and not origin.accept_norm_eps:
        raise CheckpointError(
            f"config.json has norm_eps = {values['norm_eps']}, but this network computes with {NORM_EPS}, "
            "which changes results slightly; give --accept-norm-eps to import it all the same"
        )
    return ModelConfig(
        input_size=values["sample_size"],
        in_channels=values["in_channels"],
        patch_size=values["patch_size"],
        hidden_size=values["num_attention_heads"] * values["attention_head_dim"],
        num_layers=values["num_layers"],
        num_heads=values["num_attention_heads"],
        mlp_ratio=_MLP_RATIO,
        num_classes=values["num_embeds_ada_norm"],
        learn_sigma=learns_sigma(values["in_channels"], values["out_channels"]),
        time_freq_shift=1,
        dropout=values["dropout"],
    )


DIT = DiffusersClass(_CLASS_NAME, _rows, _objection, _config_json, _read_model)
