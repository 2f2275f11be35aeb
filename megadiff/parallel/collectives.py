"""The collectives of tensor and sequence parallelism as differentiable functions.

Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022) calls the pair around a tensor-parallel region f and g. Each
function here is one of those, named after what it does forward. Token tensors are (B, N, ...), sharded on dim 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.dist.grid import Axis

TOKEN_DIM = 1
Operation = Callable[[Tensor], Tensor]


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the axis, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    if axis.ledger is not None:
        axis.ledger.note("all_reduce", total)
    else:
        dist.all_reduce(total, group=axis.group)
    return total


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The parts of all ranks joined along `dim`, in rank order."""
    parts = x.new_empty(axis.degree * x.shape[0], *x.shape[1:])
    if axis.ledger is not None:
        axis.ledger.note("all_gather", parts)
    else:
        dist.all_gather_into_tensor(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts.chunk(axis.degree), dim=dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of x over the axis."""
    parts = x.chunk(axis.degree, dim=dim)
    own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    whole = torch.cat(parts)
    if axis.ledger is not None:
        axis.ledger.note("reduce_scatter", whole)
    else:
        dist.reduce_scatter_tensor(own, whole, group=axis.group)
    return own


def own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part of x along `dim`; no communication."""
    return x.chunk(axis.degree, dim=dim)[axis.index].contiguous()


class _Pair(torch.autograd.Function):
    """One operation on the value and another on its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_value: Operation, on_gradient: Operation) -> Tensor:
        ctx.on_gradient = on_gradient
        return on_value(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.on_gradient(grad), None, None


# Collectives inside autograd functions cannot be traced, so a compiled block breaks its graph around them.
@torch.compiler.disable
def _pair(x: Tensor, on_value: Operation, on_gradient: Operation) -> Tensor:
    return _Pair.apply(x, on_value, on_gradient)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def copy_to_region(x: Tensor, axis: Axis) -> Tensor:
    """Into a tensor-parallel region: the same x on every rank; gradients of the ranks' parts are summed."""
    return _pair(x, _same, partial(all_reduce, axis=axis))


def reduce_from_region(x: Tensor, axis: Axis) -> Tensor:
    """Out of a tensor-parallel region: partial results are summed; every rank has the whole gradient."""
    return _pair(x, partial(all_reduce, axis=axis), _same)


def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Into a region under sequence parallelism: local tokens to all; gradients are summed and scattered."""
    return _pair(x, partial(all_gather, axis=axis, dim=TOKEN_DIM), partial(reduce_scatter, axis=axis, dim=TOKEN_DIM))


def reduce_scatter_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Out of a region under sequence parallelism: partial results are summed, each rank keeps its tokens."""
    return _pair(x, partial(reduce_scatter, axis=axis, dim=TOKEN_DIM), partial(all_gather, axis=axis, dim=TOKEN_DIM))


def split_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Where replicated tokens become sharded ones."""
    return _pair(x, partial(own_part, axis=axis, dim=TOKEN_DIM), partial(all_gather, axis=axis, dim=TOKEN_DIM))


def join_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Where sharded tokens become replicated ones, after which every rank computes the same."""
    return _pair(x, partial(all_gather, axis=axis, dim=TOKEN_DIM), partial(own_part, axis=axis, dim=TOKEN_DIM))


def join_columns(x: Tensor, axis: Axis, dim: int, partial_gradient: bool) -> Tensor:
    """Joins output columns.

    Args:
        x: this rank's columns.
        axis: the tensor axis.
        dim: where the columns are.
        partial_gradient: True where the ranks go on with different tokens, so that their gradients are to be summed;
            False where they all compute the same.
    """
    on_gradient = reduce_scatter if partial_gradient else own_part
    return _pair(x, partial(all_gather, axis=axis, dim=dim), partial(on_gradient, axis=axis, dim=dim))
