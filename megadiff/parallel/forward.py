"""The network's forward pass without gradients on any layout, for sampling and evaluation."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.dist.grid import Axis, Grid
from megadiff.models.chain import State

_META_SIZE = 64


@torch.no_grad()
def predict(chain: nn.Module, grid: Grid, out_channels: int, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """What the network says of x_t, equal on every rank that holds a part of this copy of it.

    All ranks of a pipeline and tensor group call it with equal inputs. On a pipeline the batch goes through in as many
    chunks as there are stages, so that the stages work at the same time.

    Args:
        chain: the whole network, or this rank's stage of it.
        grid: the layout.
        out_channels: channels of the network's output.
        x_t: (B, C, H, W). t: (B,) int64. labels: (B,) int64.

    Returns:
        (B, out_channels, H, W) in x_t's dtype.
    """
    was_training = chain.training
    chain.eval()
    if grid.pipe.degree == 1:
        output = chain((x_t, t, labels)).to(x_t.dtype)
    else:
        output = _through_stages(chain, grid, out_channels, x_t, t, labels)
    chain.train(was_training)
    return output


def _through_stages(chain: nn.Module, grid: Grid, channels: int, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    chunks = min(grid.pipe.degree, len(x_t))
    inputs = list(zip(x_t.chunk(chunks), t.chunk(chunks), labels.chunk(chunks), strict=True))
    outputs = [_stage_chunk(chain, grid, chunk) for chunk in inputs]
    result = x_t.new_empty(len(x_t), channels, *x_t.shape[2:])
    if grid.is_last_stage:
        result.copy_(torch.cat([output for output in outputs if isinstance(output, Tensor)]))
    dist.broadcast(result, src=grid.pipe.ranks[-1], group=grid.pipe.group)
    return result


def _stage_chunk(chain: nn.Module, grid: Grid, chunk: State) -> State:
    state = chain(chunk if grid.is_first_stage else _receive(grid.pipe, chunk[0].device))
    if not grid.is_last_stage:
        _send(state, grid.pipe)
    return state


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def _send(state: State, pipe: Axis) -> None:
    """Sends a state to the next stage, its shapes first."""
    tensors = (state,) if isinstance(state, Tensor) else state
    meta = [len(tensors)]
    for tensor in tensors:
        meta += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    padded = torch.tensor(meta + [0] * (_META_SIZE - len(meta)), device=tensors[0].device)
    for tensor in (padded, *tensors):
        dist.send(tensor.contiguous(), dst=pipe.ranks[pipe.index + 1], group=pipe.group)


def _receive(pipe: Axis, device: torch.device) -> tuple[Tensor, ...]:
    source = pipe.ranks[pipe.index - 1]
    meta = torch.empty(_META_SIZE, dtype=torch.int64, device=device)
    dist.recv(meta, src=source, group=pipe.group)
    count, *rest = meta.tolist()
    tensors = []
    for _ in range(count):
        dtype, dims = rest[0], rest[1]
        tensors.append(torch.empty(rest[2 : 2 + dims], dtype=_DTYPES[dtype], device=device))
        rest = rest[2 + dims :]
    for tensor in tensors:
        dist.recv(tensor, src=source, group=pipe.group)
    return tuple(tensors)
