"""The network's forward pass without gradients on any layout, for sampling and evaluation."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.config.schema import ModelConfig
from megadiff.dist.grid import Axis, Grid
from megadiff.models.feature_cache import FeatureCache, HitRate, cached_parts
from megadiff.models.sizes import output_channels
from megadiff.parallel.boundary import Boundary
from megadiff.parallel.stage import Stage, StageModule

Inputs = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def predict(
    stage: Stage,
    grid: Grid,
    out_channels: int,
    x_t: Tensor,
    t: Tensor,
    labels: Tensor,
    cache: FeatureCache | None = None,
) -> Tensor:
    """What the network says of x_t, equal on every rank that holds a part of this copy of it.

    All ranks of a pipeline and tensor group call it with equal inputs. On a pipeline the batch goes through in as many
    chunks as there are stages, so that the stages work at the same time.

    Args:
        stage: what this rank holds of the network.
        grid: the layout.
        out_channels: channels of the network's output.
        x_t: (B, C, H, W). t: (B,) int64. labels: (B,) int64, or (B, F) of a text.
        cache: runs the network where it is in one stage, and may reuse what it gave for the same batch.

    Returns:
        (B, out_channels, H, W) in x_t's dtype.
    """
    was_training = stage.chain.training
    _set_training(stage, False)
    if grid.pipe.degree == 1:
        output = (cache or stage.chain)((x_t, t, labels)).to(x_t.dtype)
    else:
        output = _through_stages(stage, grid, out_channels, (x_t, t, labels))
    _set_training(stage, was_training)
    return output


def open_predict(
    stage: Stage, grid: Grid, model: ModelConfig, cache_threshold: float, rate: HitRate
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`predict` as a function of (x_t, t, labels), for the calls of one batch of pictures.

    Args:
        stage: what this rank holds of the network: all of it, if features are to be reused.
        grid: the layout.
        model: the settings of the network.
        cache_threshold: see `megadiff.models.feature_cache`; 1 reuses nothing.
        rate: counts what is reused.
    """
    cache = None if cache_threshold == 1 else FeatureCache(cached_parts(stage.chain, model), cache_threshold, rate)
    return partial(predict, stage, grid, output_channels(model), cache=cache)


def _set_training(stage: Stage, mode: bool) -> None:
    for module in (stage.chain, *stage.modules):
        module.train(mode)


def _through_stages(stage: Stage, grid: Grid, channels: int, inputs: Inputs) -> Tensor:
    x_t = inputs[0]
    count = min(len(stage.modules) * grid.pipe.degree, len(x_t))
    chunks: list[Inputs] = list(zip(*(tensor.chunk(count) for tensor in inputs), strict=True))
    dtype = next(stage.chain.parameters()).dtype
    outputs: Sequence[Tensor | None] = [None] * len(chunks)
    for module, is_second_half in zip(stage.modules, (False, True), strict=False):
        hops = _Hops(grid.pipe, is_second_half, turns_around=grid.is_folded)
        outputs = [_run(module, hops, chunk, output, dtype) for chunk, output in zip(chunks, outputs, strict=True)]
    result = x_t.new_empty(len(x_t), channels, *x_t.shape[2:])
    if grid.is_last_stage:
        result.copy_(torch.cat([output for output in outputs if output is not None]))
    dist.broadcast(result, src=grid.last_stage_rank, group=grid.pipe.group)
    return result


class _Hops:
    """From which rank a stage's input comes and to which its output goes; None where it stays on this rank."""

    def __init__(self, pipe: Axis, is_second_half: bool, turns_around: bool) -> None:
        step = -1 if is_second_half else 1
        last = 0 if is_second_half else pipe.degree - 1
        self.pipe = pipe
        self.is_first = pipe.index == 0 and not is_second_half
        at_turn = pipe.index == pipe.degree - 1
        self.source = None if self.is_first or (is_second_half and at_turn) else pipe.ranks[pipe.index - step]
        ends = pipe.index == last
        self.target = None if ends else pipe.ranks[pipe.index + step]
        assert turns_around or not is_second_half, "a second half of an open pipeline"

    def receive(self, batch: int, boundary: Boundary, like: Tensor, dtype: torch.dtype) -> Tensor:
        packed = torch.empty(batch, boundary.numel, dtype=dtype, device=like.device)
        dist.recv(packed, src=self.source, group=self.pipe.group)
        return packed


def _run(module: StageModule, hops: _Hops, chunk: Inputs, held: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Runs one chunk through a stage; gives what stays on this rank."""
    state: Tensor | Inputs | None = chunk if hops.is_first else held
    if hops.source is not None:
        assert module.entering is not None, "a stage that receives"
        state = hops.receive(len(chunk[0]), module.entering, chunk[0], dtype)
    output: Tensor = module(state)
    if hops.target is None:
        return output
    dist.send(output, dst=hops.target, group=hops.pipe.group)
    return None
