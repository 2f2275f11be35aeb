"""DiT: the class-conditional diffusion transformer with adaLN-zero (Peebles & Xie 2022, arXiv 2212.09748).

With `long_skips` (U-ViT, Bao et al. 2023) the blocks of the second half also read the output of their mirror images.
State between layers: (tokens (B, N, D), condition (B, D)). Input: (x_t (B, C, H, W), t (B,) int64, labels (B,) int64);
label `num_classes` means "no condition". Output: (B, C or 2 C, H, W).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.config.schema import ModelConfig
from megadiff.models.chain import Builder
from megadiff.models.dropout import Dropout
from megadiff.models.layers import NORM_EPS, Attention, FeedForward, Modulation, TimeEmbedding
from megadiff.models.sizes import output_channels
from megadiff.ops.ada_layer_norm import ada_layer_norm, gated_residual
from megadiff.ops.backends import Backends
from megadiff.ops.library import Kernels


class Embed(nn.Module):
    """Pixels, timestep and class to tokens and condition."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, patch = model.hidden_size, model.patch_size
        self.patch = nn.Conv2d(model.in_channels, width, kernel_size=patch, stride=patch)
        self.time = TimeEmbedding(width, model.time_freq_shift)
        self.label = nn.Embedding(model.num_classes + 1, width)
        # At another size than that of the positions, tokens stand where their part of the picture would.
        spacing = model.position_size / model.input_size if model.position_size else 1.0
        positions = sincos_positions(width, model.input_size // patch, spacing)
        self.register_buffer("positions", positions.to(torch.float32), persistent=False)

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x_t, t, labels = state
        # Contiguous, because torch's inductor (2.13, CPU) compiles a wrong backward of a block for transposed tokens.
        tokens = self.patch(x_t.to(self.patch.weight.dtype)).flatten(2).transpose(1, 2).contiguous()
        return tokens + self.positions.to(tokens.dtype), self.time(t) + self.label(labels)


class Block(nn.Module):
    """Attention and feed-forward, each behind an adaptive LayerNorm and a gate that starts at zero.

    Where it takes a long skip, tokens and skip go through one linear layer first; its state is then (tokens, condition,
    skip).
    """

    def __init__(self, model: ModelConfig, backends: Backends, takes_skip: bool) -> None:
        super().__init__()
        width = model.hidden_size
        self.takes_skip = takes_skip
        if takes_skip:
            self.merge = nn.Linear(2 * width, width)
        self.kernels: Kernels = backends.kernels
        self.modulation = nn.Linear(width, 6 * width)
        self.attn = Attention(
            width,
            model.num_heads,
            model.qk_norm,
            model.attention_dropout,
            backends,
            tile=model.attention_tile_size,
        )
        self.mlp = FeedForward(width, int(width * model.mlp_ratio))
        self.dropout = Dropout(model.dropout)

    def forward(self, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, condition, *skip = state
        if self.takes_skip:
            x = self.merge(torch.cat([x, *skip], dim=-1))
        vectors = self.modulation(F.silu(condition)).chunk(6, dim=-1)
        attention, feed_forward = Modulation(*vectors[:3]), Modulation(*vectors[3:])
        x = self._branch(x, self.attn, attention)
        return self._branch(x, self.mlp, feed_forward), condition

    def _branch(self, x: Tensor, layer: nn.Module, modulation: Modulation) -> Tensor:
        normed = ada_layer_norm(x, modulation.shift, modulation.scale, NORM_EPS, kernels=self.kernels)
        return gated_residual(x, self.dropout(layer(normed)), modulation.gate, kernels=self.kernels)


class Head(nn.Module):
    """Tokens back to pixels; the network predicts zero at the start."""

    def __init__(self, model: ModelConfig, backends: Backends) -> None:
        super().__init__()
        self.kernels: Kernels = backends.kernels
        self.patch, self.channels = model.patch_size, output_channels(model)
        self.modulation = nn.Linear(model.hidden_size, 2 * model.hidden_size)
        self.out = nn.Linear(model.hidden_size, self.patch**2 * self.channels)

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        x, condition = state
        shift, scale = self.modulation(F.silu(condition)).chunk(2, dim=-1)
        patches = self.out(ada_layer_norm(x, shift, scale, NORM_EPS, kernels=self.kernels))
        side = int(patches.shape[1] ** 0.5)
        grid = patches.unflatten(1, (side, side)).unflatten(-1, (self.patch, self.patch, self.channels))
        return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def sincos_positions(dim: int, side: int, spacing: float = 1.0) -> Tensor:
    """Fixed two-dimensional sine-cosine positions, (side * side, dim) float64, row-major tokens.

    The first half of the features encodes the column, the second half the row; in each, sines come before cosines
    (the convention of MAE, He et al. 2021, that published DiT weights rely on).

    Args:
        dim: features, a multiple of 4.
        side: tokens a side.
        spacing: how many tokens of the size that positions are counted in one of these covers; its centre counts.
    """
    quarter = dim // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter)
    places = (torch.arange(side, dtype=torch.float64, device="cpu") + 0.5) * spacing - 0.5
    angles = places.unsqueeze(-1) * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)  # (side, dim / 2)
    columns = axis.unsqueeze(0).expand(side, side, -1)
    rows = axis.unsqueeze(1).expand(side, side, -1)
    return torch.cat([columns, rows], dim=-1).reshape(side * side, dim)


def dit_builders(model: ModelConfig, backends: Backends) -> dict[str, Builder]:
    """The layers of a DiT in order: embed, blocks.0 ... blocks.{n-1}, head."""
    skips = dit_skips(model)

    def block(name: str) -> Builder:
        return lambda: Block(model, backends, takes_skip=name in skips)

    blocks = [f"blocks.{index}" for index in range(model.num_layers)]
    return {
        "embed": lambda: Embed(model),
        **{name: block(name) for name in blocks},
        "head": lambda: Head(model, backends),
    }


def dit_skips(model: ModelConfig) -> dict[str, str]:
    """The blocks that take a long skip, and where each comes from: block i from block n - 1 - i."""
    last = model.num_layers - 1
    if not model.long_skips:
        return {}
    return {f"blocks.{last - index}": f"blocks.{index}" for index in range(model.num_layers // 2)}


def dit_initial_value(model: ModelConfig, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """The initial value of a parameter, float32 on the CPU (adaLN-zero: modulations and the output start at zero).

    Args:
        model: the network.
        name: global parameter name.
        shape: its full, unsharded shape.
        generator: the source of random numbers for this parameter alone.
    """
    value = torch.zeros(shape, device="cpu")
    if name.endswith("_norm.weight"):
        return value.fill_(1.0)
    if name.endswith(".bias") or ".modulation." in name or name.startswith("head.out."):
        return value
    if name == "embed.label.weight" or name.startswith("embed.time."):
        return value.normal_(std=0.02, generator=generator)
    flat = value.view(shape[0], -1)
    nn.init.xavier_uniform_(flat, generator=generator)
    return value
