"""Global gradient norm, clipping and float64 averaging where DeepSpeed has no sharded optimizer (ZeRO 0).

DeepSpeed's own norm is wrong there on pipelines, so each logical parameter is counted once over the grid here.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.dist.grid import Axis, Grid

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_ and in DeepSpeed's sharded optimizers


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter], grid: Grid) -> Tensor:
    """The L2 norm of all gradients of the network, equal on every rank; in the gradients' dtype.

    A parameter that every tensor rank holds (no `tensor_model_parallel` mark) counts on tensor rank 0 only; pipeline
    stages hold different parameters; data ranks hold equal, already averaged gradients.
    """
    held = list(parameters)
    grads = [
        parameter.grad
        for parameter in held
        if parameter.grad is not None and (grid.tensor.index == 0 or getattr(parameter, "tensor_model_parallel", False))
    ]
    total = torch.zeros((), dtype=held[0].dtype, device=held[0].device)
    if grads:
        total += torch.stack(torch._foreach_norm(grads)).square().sum()
    dist.all_reduce(total, group=grid.model_group)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: list[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scales all gradients so that their global norm is at most `limit`; 0 leaves them alone. No host sync."""
    if limit == 0:
        return
    factor = (limit / (norm + _EPSILON)).clamp(max=1.0)
    torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], data: Axis) -> None:
    """Averages float64 gradients over the data ranks, which DeepSpeed refuses, or would do in float32."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=data.group)
            parameter.grad /= data.degree
