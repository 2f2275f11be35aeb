"""UNet: ResNet blocks and attention on a pyramid of resolutions, with long skips from the way down to the way up.

DDPM (Ho et al. 2020), ADM (Dhariwal & Nichol 2021), latent diffusion (Rombach et al. 2022), SDXL (Podell et al. 2023).
State between layers: (x (B, C, H, W) channels-last, condition (B, D)), with a text (B, M, E) after them where the
network reads one; inside a transformer (tokens (B, H W, C), condition, text, x before it). Input: (x_t (B, C, H, W),
t (B,) int64, labels), labels as in `megadiff.diffusion.condition`. Output: (B, C or 2 C, H, W).
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.config.schema import ModelConfig
from megadiff.models.chain import Builder
from megadiff.models.dropout import Dropout
from megadiff.models.layers import Attention, GatedFeedForward, GroupNorm, TimeEmbedding, sinusoids
from megadiff.models.skip import Junction
from megadiff.models.unet_table import UNetLayer, time_channels, unet_table
from megadiff.ops.backends import Backends

State = tuple[Tensor, ...]

_MLP_RATIO = 4
_LAYER_NORM_EPS = 1e-5
_TRANSFORMER_NORM_EPS = 1e-6
SIZE_FEATURES = 256
SIZE_NUMBERS = 6  # height and width of the original, top and left of the crop, height and width of the target


class TextCondition(nn.Module):
    """The pooled text and the picture's size, (B, pooled) -> (B, D) (SDXL, section 2.2).

    Sizes are constant here: pictures of `pixel_size` that were not cropped.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.pixel_size, self.freq_shift = model.pixel_size, model.time_freq_shift
        sizes = SIZE_NUMBERS * SIZE_FEATURES if model.pixel_size else 0
        self.fc1 = nn.Linear(model.pooled_dim + sizes, time_channels(model))
        self.fc2 = nn.Linear(time_channels(model), time_channels(model))

    def forward(self, pooled: Tensor) -> Tensor:
        if self.pixel_size:
            size = float(self.pixel_size)
            numbers = torch.tensor([size, size, 0.0, 0.0, size, size], device=pooled.device)
            features = sinusoids(numbers, SIZE_FEATURES, self.freq_shift, pooled.dtype).flatten()
            pooled = torch.cat([pooled, features.expand(len(pooled), -1)], dim=1)
        return self.fc2(F.silu(self.fc1(pooled)))


class Embed(nn.Module):
    """Pixels, timestep and class or text to the first feature map and the condition."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.block_out_channels[0]
        self.kind, self.text_shape = model.condition, (model.text_length, model.cross_attention_dim)
        self.conv = nn.Conv2d(model.in_channels, width, kernel_size=3, padding=1)
        self.time = TimeEmbedding(time_channels(model), model.time_freq_shift, num_features=width)
        if model.condition == "class":
            self.label = nn.Embedding(model.num_classes + 1, time_channels(model))
        elif model.condition == "text" and model.pooled_dim:
            self.pooled = TextCondition(model)

    def forward(self, state: State) -> State:
        x_t, t, labels = state
        x = self.conv(x_t.to(self.conv.weight.dtype).contiguous(memory_format=torch.channels_last))
        condition = self.time(t)
        if self.kind == "none":
            return x, condition
        if self.kind == "class":
            return x, condition + self.label(labels)
        length, width = self.text_shape
        text, pooled = labels.to(x.dtype).split((length * width, labels.shape[1] - length * width), dim=1)
        if pooled.shape[1]:
            condition = condition + self.pooled(pooled)
        return x, condition, text.unflatten(1, self.text_shape)


class ResNet(nn.Module):
    """Two convolutions behind GroupNorm-SiLU, with the condition between them; on the way up a skip joins first."""

    def __init__(self, layer: UNetLayer, model: ModelConfig, backends: Backends) -> None:
        super().__init__()
        groups, eps = model.norm_num_groups, model.norm_eps
        self.has_skip = layer.skip_from is not None
        if self.has_skip:
            self.junction = Junction(layer, model)
        inputs = layer.in_channels if model.skip == "gated" else layer.resnet_channels
        outputs = layer.out_channels
        self.norm1 = GroupNorm(groups, inputs, eps, backends)
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
        self.is_scaled = model.resnet_time_scale_shift
        self.time_shift = nn.Linear(time_channels(model), outputs)
        if self.is_scaled:
            self.time_scale = nn.Linear(time_channels(model), outputs)
        self.norm2 = GroupNorm(groups, outputs, eps, backends)
        self.dropout = Dropout(model.dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, kernel_size=1) if inputs != outputs else nn.Identity()

    def forward(self, state: State) -> State:
        x, condition, *rest = state
        if self.has_skip:
            x = self.junction(x, rest.pop(), condition)
        hidden = self.conv1(self.norm1(x))
        vector = F.silu(condition)
        if self.is_scaled:
            hidden = self.norm2(hidden, scale=self.time_scale(vector), shift=self.time_shift(vector))
        else:
            hidden = self.norm2(hidden, offset=self.time_shift(vector))
        return (self.shortcut(x) + self.conv2(self.dropout(hidden)), condition, *rest)


class SelfAttention(nn.Module):
    """Attention of a feature map to itself, behind a GroupNorm, added to it."""

    def __init__(self, layer: UNetLayer, model: ModelConfig, backends: Backends) -> None:
        super().__init__()
        width = layer.out_channels
        self.norm = GroupNorm(model.norm_num_groups, width, model.norm_eps, backends, silu=False)
        self.attention = Attention(
            width,
            width // model.attention_head_dim,
            False,
            model.attention_dropout,
            backends,
            tile=model.attention_tile_size,
        )

    def forward(self, state: State) -> State:
        x, *rest = state
        return (x + to_map(self.attention(to_tokens(self.norm(x))), x.shape), *rest)


class TransformerEnter(nn.Module):
    """A feature map to tokens; the map itself waits at the end of the state."""

    def __init__(self, layer: UNetLayer, model: ModelConfig, backends: Backends) -> None:
        super().__init__()
        width = layer.out_channels
        self.norm = GroupNorm(model.norm_num_groups, width, _TRANSFORMER_NORM_EPS, backends, silu=False)
        self.linear = nn.Linear(width, width)

    def forward(self, state: State) -> State:
        x, condition, text = state
        return self.linear(to_tokens(self.norm(x))), condition, text, x


class TransformerBlock(nn.Module):
    """Self-attention, attention to the text, feed-forward, each behind a LayerNorm."""

    def __init__(self, layer: UNetLayer, model: ModelConfig, backends: Backends) -> None:
        super().__init__()
        width, heads = layer.out_channels, layer.out_channels // model.attention_head_dim
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, eps=_LAYER_NORM_EPS) for _ in range(3))
        dropout = model.attention_dropout
        self.self_attn = Attention(
            width, heads, False, dropout, backends, qkv_bias=False, tile=model.attention_tile_size
        )
        self.cross_attn = Attention(
            width, heads, False, dropout, backends, context_dim=model.cross_attention_dim, qkv_bias=False
        )
        self.mlp = GatedFeedForward(width, _MLP_RATIO * width)

    def forward(self, state: State) -> State:
        tokens, condition, text, x = state
        tokens = tokens + self.self_attn(self.norm1(tokens))
        tokens = tokens + self.cross_attn(self.norm2(tokens), text)
        return tokens + self.mlp(self.norm3(tokens)), condition, text, x


class TransformerLeave(nn.Module):
    """Tokens back to the feature map that they were made of."""

    def __init__(self, layer: UNetLayer) -> None:
        super().__init__()
        self.linear = nn.Linear(layer.out_channels, layer.out_channels)

    def forward(self, state: State) -> State:
        tokens, condition, text, x = state
        return x + to_map(self.linear(tokens), x.shape), condition, text


class Downsample(nn.Module):
    """Half the resolution, by a convolution with stride 2 or by the mean of 2 x 2 pixels."""

    def __init__(self, layer: UNetLayer, model: ModelConfig) -> None:
        super().__init__()
        width = layer.out_channels
        self.conv = nn.Conv2d(width, width, 3, stride=2, padding=1) if model.resample == "conv" else nn.AvgPool2d(2)

    def forward(self, state: State) -> State:
        return (self.conv(state[0]), *state[1:])


class Upsample(nn.Module):
    """Twice the resolution: nearest pixels, and a convolution unless resampling is pooled."""

    def __init__(self, layer: UNetLayer, model: ModelConfig) -> None:
        super().__init__()
        width = layer.out_channels
        self.conv = nn.Conv2d(width, width, 3, padding=1) if model.resample == "conv" else nn.Identity()

    def forward(self, state: State) -> State:
        return (self.conv(F.interpolate(state[0], scale_factor=2.0, mode="nearest")), *state[1:])


class Head(nn.Module):
    """The last feature map to the prediction, which is zero at the start."""

    def __init__(self, layer: UNetLayer, model: ModelConfig, backends: Backends) -> None:
        super().__init__()
        self.norm = GroupNorm(model.norm_num_groups, layer.in_channels, model.norm_eps, backends)
        self.conv = nn.Conv2d(layer.in_channels, layer.out_channels, kernel_size=3, padding=1)

    def forward(self, state: State) -> Tensor:
        return self.conv(self.norm(state[0])).contiguous()


def to_tokens(x: Tensor) -> Tensor:
    """(B, C, H, W) channels-last -> (B, H W, C), a view."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def to_map(tokens: Tensor, shape: torch.Size) -> Tensor:
    """(B, H W, C) -> (B, C, H, W) channels-last, a view."""
    return tokens.unflatten(1, tuple(shape[2:])).permute(0, 3, 1, 2)


def unet_builders(model: ModelConfig, backends: Backends) -> dict[str, Builder]:
    """The layers of a UNet in the order of `unet_table`."""
    return {layer.name: functools.partial(_build, layer, model, backends) for layer in unet_table(model)}


def _build(layer: UNetLayer, model: ModelConfig, backends: Backends) -> nn.Module:
    match layer.kind:
        case "embed":
            return Embed(model)
        case "resnet":
            return ResNet(layer, model, backends)
        case "attn":
            return SelfAttention(layer, model, backends)
        case "enter":
            return TransformerEnter(layer, model, backends)
        case "block":
            return TransformerBlock(layer, model, backends)
        case "leave":
            return TransformerLeave(layer)
        case "down":
            return Downsample(layer, model)
        case "up":
            return Upsample(layer, model)
        case "head":
            return Head(layer, model, backends)


def unet_skips(model: ModelConfig) -> dict[str, str]:
    """The layers that take a long skip, and where each comes from."""
    return {layer.name: layer.skip_from for layer in unet_table(model) if layer.skip_from is not None}


# Last modules of residual branches and of the network, which start at zero (ADM), and gates, which start at one half.
_ZEROS = ("conv2.weight", "out.weight", "leave.linear.weight", "head.conv.weight", "junction.gate.weight")


def unet_initial_value(model: ModelConfig, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """The initial value of a parameter, float32 on the CPU; see `dit_initial_value`."""
    value = torch.zeros(shape, device="cpu")
    if name.endswith(".offsets"):
        return value.normal_(std=model.skip_shift_strength, generator=generator)
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "norm3.weight")):
        return value.fill_(1.0)
    if name.endswith(".bias") or name.endswith(_ZEROS):
        return value
    if name == "embed.label.weight":
        return value.normal_(std=0.02, generator=generator)
    bound = shape[1:].numel() ** -0.5
    return value.uniform_(-bound, bound, generator=generator)
