"""The config.json of diffusers' UNets as one schema each, of what our UNet can hold.

A field has diffusers' own default (diffusers 0.42, unets/unet_2d.py and unet_2d_condition.py). `attention_head_dim` is
the size of a head in UNet2DModel, but the number of heads in UNet2DConditionModel
(https://github.com/huggingface/diffusers/issues/2011).
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megadiff.config.schema import Widths, ZeroOrOne


def _even(value: object) -> object:
    """One value for a list of equal ones, which diffusers allows in many places."""
    return value[0] if isinstance(value, list) and value and all(entry == value[0] for entry in value) else value


def _list_to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


One = Annotated[float, Field(ge=1, le=1)]
EvenInt = Annotated[int, Field(gt=0), BeforeValidator(_even)]
EvenFalse = Annotated[Literal[False], BeforeValidator(_even)]
Count = Annotated[int, Field(gt=0)]
DownBlocks = Annotated[tuple[Literal["DownBlock2D", "AttnDownBlock2D"], ...], BeforeValidator(_list_to_tuple)]
UpBlocks = Annotated[tuple[Literal["UpBlock2D", "AttnUpBlock2D"], ...], BeforeValidator(_list_to_tuple)]
CrossDownBlocks = Annotated[tuple[Literal["DownBlock2D", "CrossAttnDownBlock2D"], ...], BeforeValidator(_list_to_tuple)]
CrossUpBlocks = Annotated[tuple[Literal["UpBlock2D", "CrossAttnUpBlock2D"], ...], BeforeValidator(_list_to_tuple)]
OneOrEach = Annotated[int | tuple[Count, ...], BeforeValidator(_list_to_tuple)]


class UNetJson(BaseModel):
    """What both classes know; fields without a default are always written by diffusers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    sample_size: EvenInt
    center_input_sample: Literal[False] = False
    time_embedding_type: Literal["positional"] = "positional"
    time_embedding_dim: int | None = None
    freq_shift: ZeroOrOne = 0
    flip_sin_to_cos: Literal[True] = True
    block_out_channels: Widths
    layers_per_block: EvenInt = 2
    mid_block_scale_factor: One = 1.0
    downsample_padding: Literal[1] = 1
    dropout: float = 0.0
    act_fn: Literal["silu", "swish"] = "silu"
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    class_embed_type: None = None


class UNet2DModelJson(UNetJson):
    """`UNet2DModel`."""

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: DownBlocks
    mid_block_type: Literal["UNetMidBlock2D"] = "UNetMidBlock2D"
    up_block_types: UpBlocks
    downsample_type: Literal["conv"] = "conv"
    upsample_type: Literal["conv"] = "conv"
    attention_head_dim: int | None = 8
    attn_norm_num_groups: int | None = None
    add_attention: bool = True
    num_class_embeds: int | None = None
    num_train_timesteps: int | None = None


class UNet2DConditionModelJson(UNetJson):
    """`UNet2DConditionModel`."""

    in_channels: int = 4
    out_channels: int = 4
    down_block_types: CrossDownBlocks
    mid_block_type: Literal["UNetMidBlock2DCrossAttn"] = "UNetMidBlock2DCrossAttn"
    up_block_types: CrossUpBlocks
    only_cross_attention: EvenFalse = False
    cross_attention_dim: EvenInt = 1280
    transformer_layers_per_block: OneOrEach = 1
    reverse_transformer_layers_per_block: None = None
    encoder_hid_dim: None = None
    encoder_hid_dim_type: None = None
    attention_head_dim: OneOrEach = 8
    num_attention_heads: None = None
    dual_cross_attention: Literal[False] = False
    use_linear_projection: Literal[True]
    addition_embed_type: Literal["text_time"] | None = None
    addition_time_embed_dim: int | None = None
    num_class_embeds: None = None
    upcast_attention: bool | None = False  # a matter of half precision
    resnet_skip_time_act: Literal[False] = False
    resnet_out_scale_factor: One = 1.0
    time_embedding_act_fn: None = None
    timestep_post_act: None = None
    time_cond_proj_dim: None = None
    conv_in_kernel: Literal[3] = 3
    conv_out_kernel: Literal[3] = 3
    projection_class_embeddings_input_dim: int | None = None
    attention_type: Literal["default"] = "default"
    class_embeddings_concat: Literal[False] = False
    mid_block_only_cross_attention: Literal[False] | None = None
    cross_attention_norm: None = None
    addition_embed_type_num_heads: int = 64
