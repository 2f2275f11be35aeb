"""A convolution whose weights are stored as int8, one scale an output channel.

Shape letters: B samples, I and O input and output channels, G groups, H and W of a map, kH and kW of a kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LARGEST = 127  # the same on both sides of zero


class Int8Conv2d(nn.Module):
    """A convolution (B, I, H, W) -> (B, O, H', W') with weight-only int8, for inference.

    A weight is round(weight / scale) in [-127, 127] with scale = max |weight| / 127 of its output channel, so that each
    is wrong by at most half a scale. Weights are multiplied out at each use, in the input's dtype; the bias and the
    arithmetic stay as they were. There is no attribute `weight`, so that nothing takes the int8 numbers for weights.

    Attributes:
        codes: (O, I / G, kH, kW) int8.
        scale: (O,) float32.
        bias: (O,) in its former dtype, or None.
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        """Takes over a convolution of any kernel, stride, padding, dilation and groups, which is padded with zeros."""
        super().__init__()
        assert conv.padding_mode == "zeros", "no network here pads in another way"
        self.stride, self.padding, self.dilation, self.groups = conv.stride, conv.padding, conv.dilation, conv.groups
        weight = conv.weight.detach().float()
        scale = weight.abs().amax((1, 2, 3)) / _LARGEST
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # a channel of zeros stays one
        self.register_buffer("codes", (weight / scale[:, None, None, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = conv.bias

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights that it computes with, (O, I / G, kH, kW)."""
        return self.codes.to(dtype) * self.scale.to(dtype)[:, None, None, None]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.dequantized(x.dtype)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
