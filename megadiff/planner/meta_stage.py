"""Stages on the meta device, as a tensor rank holds them: a dry run without values or processes."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.config.layout import Layout
from megadiff.config.schema import Config
from megadiff.dist.grid import Axis
from megadiff.dist.traffic import Ledger
from megadiff.models import meta_chain
from megadiff.models.chain import Chain
from megadiff.models.states import meta_inputs
from megadiff.ops.backends import Backends
from megadiff.parallel.boundary import state_before
from megadiff.parallel.plan import Sharding, apply_plan, sum_partial_gradients
from megadiff.parallel.plans import plan_for
from megadiff.parallel.stage import DTYPES


def tensor_axis(degree: int) -> Axis:
    """An axis for `apply_plan` on the meta device: it has a degree and a ledger in place of processes to talk to."""
    return Axis(degree, 0, tuple(range(degree)), cast(dist.ProcessGroup, None), Ledger(degree))


def sharded_layers(config: Config, layers: tuple[str, ...], axis: Axis) -> tuple[Chain, Sharding]:
    """Layers as a tensor rank holds them, and how they are sharded."""
    train = config.train
    chain = meta_chain(config.model, Backends("auto", train.kernels, "torch"), layers)
    return chain, apply_plan(chain, plan_for(config.model), axis, config.parallel.sequence_parallel)


def run_stage(config: Config, layout: Layout, layers: tuple[str, ...], axis: Axis) -> tuple[Tensor, ...]:
    """The forward pass of a micro-batch through a stage; what it gives has a graph.

    Args:
        config: network, precision and checkpointing.
        layout: its micro-batch.
        layers: of the stage.
        axis: see `tensor_axis`.
    """
    chain, sharding = sharded_layers(config, layers, axis)
    sum_partial_gradients(chain, sharding.partial, axis)
    chain.to("meta", DTYPES[config.train.precision])
    chain.set_recompute(config.train.activation_checkpointing, config.train.activation_checkpoint_every_blocks)
    output = chain(_entering_state(config, layout, layers[0], chain))
    return output if isinstance(output, tuple) else (output,)


def _entering_state(config: Config, layout: Layout, first: str, chain: Chain) -> tuple[Tensor, ...]:
    if first == chain.start:
        return meta_inputs(config.model, layout.micro_batch_size)
    dtype = DTYPES[config.train.precision]
    return tuple(
        _empty(layout.micro_batch_size, shape, dtype) for shape in state_before(config, first, with_skips=True).shapes
    )


def _empty(batch: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.empty(batch, *shape, dtype=dtype, device="meta")
    if values.dim() == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    return values.requires_grad_()
