"""Where a long skip joins the way up: joined channels or a learnt gate, and a learnt sub-pixel shift of the skip."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.config.schema import ModelConfig
from megadiff.models.unet_table import UNetLayer, time_channels


class SkipShift(nn.Module):
    """Moves each channel of a skip by its own learnt (dx, dy) of at most one pixel.

    The offsets are tanh(offsets), times a gate in [0, 1] a channel that reads the condition. Positions between pixels
    are interpolated linearly, and pixels beyond the border repeat it.
    """

    def __init__(self, channels: int, condition_channels: int) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.empty(2, channels))
        self.gate = nn.Linear(condition_channels, channels)

    def forward(self, skip: Tensor, condition: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(F.silu(condition)))  # (B, C)
        dx, dy = (gate * offset for offset in torch.tanh(self.offsets))
        return shift_dim(shift_dim(skip, dx, 3), dy, 2)


def shift_dim(x: Tensor, distance: Tensor, dim: int) -> Tensor:
    """x at positions that lie `distance` further along a dim, linearly interpolated.

    Args:
        x: (B, C, H, W).
        distance: (B, C) in [-1, 1] pixels.
        dim: 2 for rows, 3 for columns.
    """
    size = x.shape[dim]
    distance = distance[:, :, None, None]
    before = torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 0, size - 1)], dim)
    after = torch.cat([x.narrow(dim, 1, size - 1), x.narrow(dim, size - 1, 1)], dim)
    return x + distance.clamp(min=0) * (after - x) + (-distance).clamp(min=0) * (before - x)


class Junction(nn.Module):
    """(x (B, C, H, W), skip (B, S, H, W), condition (B, D)) -> (B, C + S, H, W), or (B, C, H, W) where it is gated.

    The gate is g x + (1 - g) skip with g = sigmoid(W x + b), which starts at one half; a skip of another width is
    projected first.
    """

    def __init__(self, layer: UNetLayer, model: ModelConfig) -> None:
        super().__init__()
        width, skip_width = layer.in_channels, layer.skip_channels
        self.is_gated, self.is_shifted = model.skip == "gated", model.skip_shift
        if self.is_shifted:
            self.shift = SkipShift(skip_width, time_channels(model))
        if self.is_gated:
            self.gate = nn.Conv2d(width, width, kernel_size=1)
            self.project = nn.Conv2d(skip_width, width, kernel_size=1) if skip_width != width else nn.Identity()

    def forward(self, x: Tensor, skip: Tensor, condition: Tensor) -> Tensor:
        if self.is_shifted:
            skip = self.shift(skip, condition)
        if not self.is_gated:
            return torch.cat([x, skip], dim=1)
        return torch.lerp(self.project(skip), x, torch.sigmoid(self.gate(x)))
