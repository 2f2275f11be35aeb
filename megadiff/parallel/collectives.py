"""The collectives of tensor and sequence parallelism as differentiable functions.

Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022) calls the pair around a tensor-parallel region f and g. Each
function here is one of those, named after what it does forward. Token tensors are (B, N, ...), sharded on dim 1.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.dist.grid import Axis

TOKEN_DIM = 1


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the axis, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The parts of all ranks joined along `dim`, in rank order."""
    parts = x.new_empty(axis.degree * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts.chunk(axis.degree), dim=dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of x over the axis."""
    parts = x.chunk(axis.degree, dim=dim)
    own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_tensor(own, torch.cat(parts), group=axis.group)
    return own


def own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part of x along `dim`; no communication."""
    return x.chunk(axis.degree, dim=dim)[axis.index].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis, TOKEN_DIM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.axis, TOKEN_DIM), None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis, TOKEN_DIM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.axis, TOKEN_DIM), None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return own_part(x, axis, TOKEN_DIM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.axis, TOKEN_DIM), None


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis, TOKEN_DIM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_part(grad, ctx.axis, TOKEN_DIM), None


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, partial_gradient: bool) -> Tensor:
        ctx.axis, ctx.partial_gradient = axis, partial_gradient
        return all_gather(x, axis, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        part = reduce_scatter if ctx.partial_gradient else own_part
        return part(grad, ctx.axis, -1), None, None


# Collectives inside autograd functions cannot be traced, so a compiled block breaks its graph around them.


@torch.compiler.disable
def copy_to_region(x: Tensor, axis: Axis) -> Tensor:
    """Into a tensor-parallel region: the same x on every rank; gradients of the ranks' parts are summed."""
    return _Copy.apply(x, axis)


@torch.compiler.disable
def reduce_from_region(x: Tensor, axis: Axis) -> Tensor:
    """Out of a tensor-parallel region: partial results are summed; every rank has the whole gradient."""
    return _Reduce.apply(x, axis)


@torch.compiler.disable
def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Into a region under sequence parallelism: local tokens to all; gradients are summed and scattered."""
    return _GatherTokens.apply(x, axis)


@torch.compiler.disable
def reduce_scatter_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Out of a region under sequence parallelism: partial results are summed, each rank keeps its tokens."""
    return _ReduceScatterTokens.apply(x, axis)


@torch.compiler.disable
def split_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Where replicated tokens become sharded ones."""
    return _SplitTokens.apply(x, axis)


@torch.compiler.disable
def join_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Where sharded tokens become replicated ones, after which every rank computes the same."""
    return _JoinTokens.apply(x, axis)


@torch.compiler.disable
def join_columns(x: Tensor, axis: Axis, partial_gradient: bool) -> Tensor:
    """Joins output columns along the last dim.

    Args:
        partial_gradient: True where the ranks go on with different tokens, so that their gradients are to be summed;
            False where they all compute the same.
    """
    return _JoinColumns.apply(x, axis, partial_gradient)
