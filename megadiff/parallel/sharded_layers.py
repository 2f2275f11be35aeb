"""The shards of modules that tensor parallelism cuts: what one rank holds and the collectives around it."""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.dist.grid import Axis
from megadiff.errors import PlanError
from megadiff.models.layers import GroupNorm
from megadiff.parallel import collectives

Style = Literal["column", "row", "joined_column", "groups"]
CHANNEL_DIM = 1


class RowLinear(nn.Module):
    """A linear layer of which each rank holds some input features; partial outputs are summed, then the bias added."""

    def __init__(self, whole: nn.Linear, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        self.weight = nn.Parameter(torch.empty(whole.out_features, whole.in_features // axis.degree))
        self.bias = None if whole.bias is None else nn.Parameter(torch.empty(whole.out_features))

    def forward(self, x: Tensor) -> Tensor:
        leave = collectives.reduce_scatter_tokens if self.sequence else collectives.reduce_from_region
        total = leave(F.linear(x, self.weight), self.axis)
        return total if self.bias is None else total + self.bias


class JoinedColumnLinear(nn.Linear):
    """A linear layer of which each rank computes some output features, and every rank gets all of them."""

    def __init__(self, whole: nn.Linear, axis: Axis, sequence: bool) -> None:
        super().__init__(whole.in_features, whole.out_features // axis.degree, whole.bias is not None)
        self.axis, self.sequence = axis, sequence

    def forward(self, x: Tensor) -> Tensor:
        columns = super().forward(collectives.copy_to_region(x, self.axis))
        return collectives.join_columns(columns, self.axis, dim=-1, partial_gradient=self.sequence)


class _ConvShard(nn.Conv2d):
    """Some input or output channels of a convolution with a square kernel."""

    def __init__(self, whole: nn.Conv2d, in_channels: int, out_channels: int, axis: Axis) -> None:
        padding = whole.padding[0]
        assert isinstance(padding, int), "a padding by name"
        size, stride, has_bias = whole.kernel_size[0], whole.stride[0], whole.bias is not None
        super().__init__(in_channels, out_channels, size, stride, padding, bias=has_bias)
        self.axis = axis


class ColumnConv(_ConvShard):
    """A convolution of which each rank computes some output channels."""

    def __init__(self, whole: nn.Conv2d, axis: Axis) -> None:
        super().__init__(whole, whole.in_channels, whole.out_channels // axis.degree, axis)


class JoinedColumnConv(ColumnConv):
    """A convolution of which each rank computes some output channels, and every rank gets all of them."""

    def forward(self, x: Tensor) -> Tensor:
        channels = super().forward(collectives.copy_to_region(x, self.axis))
        return collectives.join_columns(channels, self.axis, dim=CHANNEL_DIM, partial_gradient=False)


class RowConv(_ConvShard):
    """A convolution of which each rank holds some input channels; partial outputs are summed, then the bias added."""

    def __init__(self, whole: nn.Conv2d, axis: Axis) -> None:
        super().__init__(whole, whole.in_channels // axis.degree, whole.out_channels, axis)

    def forward(self, x: Tensor) -> Tensor:
        total = collectives.reduce_from_region(self._conv_forward(x, self.weight, None), self.axis)
        return total if self.bias is None else total + self.bias[:, None, None]


class GroupNormShard(GroupNorm):
    """A GroupNorm of which each rank holds whole groups."""

    def __init__(self, whole: GroupNorm, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.num_groups, self.channels = whole.num_groups // axis.degree, whole.channels // axis.degree
        self.eps, self.silu, self.kernels = whole.eps, whole.silu, whole.kernels
        self.weight, self.bias = (nn.Parameter(torch.empty(self.channels)) for _ in range(2))


def make_shard(name: str, module: nn.Module, style: Style, axis: Axis, sequence: bool) -> nn.Module:
    """This rank's part of a module, on the module's device and without values.

    Args:
        name: of the module, for messages.
        module: whole.
        style: see `Plan.styles`.
        axis: the tensor axis.
        sequence: whether tokens are sharded outside of tensor-parallel regions.

    Raises:
        PlanError: the style does not shard such modules, or the axis's degree does not divide what it shards.
    """
    weight = module.get_parameter("weight") if sharded_parameters(module, style) else None
    if weight is None:
        raise PlanError(f"{name} is a {type(module).__name__}; the style {style} does not shard such layers")
    _check_divides(name, module, style, axis)
    with torch.device(weight.device):
        match module, style:
            case nn.Linear(), "row":
                return RowLinear(module, axis, sequence)
            case nn.Linear(), "joined_column":
                return JoinedColumnLinear(module, axis, sequence)
            case nn.Linear(), _:
                return nn.Linear(module.in_features, module.out_features // axis.degree, module.bias is not None)
            case nn.Conv2d(), "row":
                return RowConv(module, axis)
            case nn.Conv2d(), "joined_column":
                return JoinedColumnConv(module, axis)
            case nn.Conv2d(), _:
                return ColumnConv(module, axis)
            case GroupNorm(), _:
                return GroupNormShard(module, axis)
    raise AssertionError("sharded_parameters names all cases")


def sharded_parameters(module: nn.Module, style: Style) -> Mapping[str, int]:
    """The parameters of a module that a style cuts, and the dim of each; empty where it does not fit the module."""
    if isinstance(module, GroupNorm) != (style == "groups") or not isinstance(
        module, GroupNorm | nn.Linear | nn.Conv2d
    ):
        return {}
    if style == "row":
        return {"weight": 1}
    return {"weight": 0} if module.bias is None else {"weight": 0, "bias": 0}


def _check_divides(name: str, module: nn.Module, style: Style, axis: Axis) -> None:
    if isinstance(module, GroupNorm):
        size, what = module.num_groups, "groups"
    else:
        size, what = module.get_parameter("weight").shape[1 if style == "row" else 0], "features"
    if size % axis.degree:
        raise PlanError(f"tensor_model_parallel_size = {axis.degree} does not divide {name}'s {size} {what}")
