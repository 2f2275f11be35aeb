"""The config.json of diffusers' UNets as one schema each, from which it is written and by which it is checked.

A field has diffusers' own default, and its type allows what our UNet can hold (diffusers 0.42, unets/unet_2d.py and
unet_2d_condition.py). `attention_head_dim` is the size of a head in UNet2DModel, but the number of heads in
UNet2DConditionModel (https://github.com/huggingface/diffusers/issues/2011).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megadiff.checkpoint.diffusers_class import learns_sigma
from megadiff.checkpoint.names import Origin
from megadiff.config.schema import Counts, ModelConfig, Widths, ZeroOrOne
from megadiff.errors import CheckpointError
from megadiff.models.sizes import output_channels
from megadiff.models.unet import SIZE_FEATURES, SIZE_NUMBERS
from megadiff.models.unet_table import time_channels

# What diffusers' EMAModel adds to the config.json of averaged weights.
_EMA_KEYS = {"decay", "inv_gamma", "min_decay", "optimization_step", "power", "update_after_step", "use_ema_warmup"}
_PIXELS_PER_LATENT = 8
_DEFAULT_TEXT_LENGTH = 77
# Settings of a network that neither its weights nor its config.json tell.
_UNTOLD: Mapping[str, tuple[str, ...]] = {
    "class": ("cross_attention_dim", "text_length", "pooled_dim", "pixel_size"),
    "none": ("num_classes", "cross_attention_dim", "text_length", "pooled_dim", "pixel_size"),
    "text": ("num_classes",),
}


def _even(value: object) -> object:
    """One value for a list of equal ones, which diffusers allows in many places."""
    return value[0] if isinstance(value, list) and value and all(entry == value[0] for entry in value) else value


def _list_to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


One = Annotated[float, Field(ge=1, le=1)]
EvenInt = Annotated[int, Field(gt=0), BeforeValidator(_even)]
EvenFalse = Annotated[Literal[False], BeforeValidator(_even)]
DownBlock = Literal["DownBlock2D", "AttnDownBlock2D"]
UpBlock = Literal["UpBlock2D", "AttnUpBlock2D"]
CrossDownBlock = Literal["DownBlock2D", "CrossAttnDownBlock2D"]
CrossUpBlock = Literal["UpBlock2D", "CrossAttnUpBlock2D"]


class _UNetJson(BaseModel):
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
