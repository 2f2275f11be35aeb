"""Stages on the meta device, as a tensor rank holds them: a dry run without values or processes."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.config.layout import Layout
from megadiff.config.schema import Config
from megadiff.dist.grid import Axis
from megadiff.dist.traffic import Ledger
from megadiff.models import meta_chain
from megadiff.models.chain import Chain
from megadiff.models.states import meta_inputs
from megadiff.ops.backends import Backends
from megadiff.parallel.plan import Sharding, apply_plan, sum_partial_gradients
from megadiff.parallel.plans import plan_for
from megadiff.parallel.stage import DTYPES, StageModule, stage_layers, stage_modules, stages_of_rank


def tensor_axis(degree: int) -> Axis:
    """An axis for `apply_plan` on the meta device: it has a degree and a ledger in place of processes to talk to."""
    return Axis(degree, 0, tuple(range(degree)), cast(dist.ProcessGroup, None), Ledger(degree))


def sharded_layers(config: Config, layers: tuple[str, ...], axis: Axis) -> tuple[Chain, Sharding]:
    """Layers as a tensor rank holds them, and how they are sharded."""
    train = config.train
    chain = meta_chain(config.model, Backends("auto", train.kernels, "torch"), layers)
    return chain, apply_plan(chain, plan_for(config.model), axis, config.parallel.sequence_parallel)


def meta_stages(config: Config, rank: int, axis: Axis) -> tuple[nn.Module, ...]:
    """What a pipeline rank runs, in the order in which a micro-batch passes: a whole network, one stage or two.

    Args:
        config: network, layout, precision and checkpointing.
        rank: number of the pipeline rank.
        axis: see `tensor_axis`.
    """
    stages, ranks = stage_layers(config), config.parallel.pipeline_model_parallel_size
    own = stages_of_rank(len(stages), ranks, rank)
    chain, sharding = sharded_layers(config, tuple(name for number in own for name in stages[number]), axis)
    sum_partial_gradients(chain, sharding.partial, axis)
    chain.to("meta", DTYPES[config.train.precision])
    chain.set_recompute(config.train.activation_checkpointing, config.train.activation_checkpoint_every_blocks)
    return stage_modules(config, chain, stages, own) if ranks > 1 else (chain,)


def entering_state(config: Config, layout: Layout, stage: nn.Module) -> Tensor | tuple[Tensor, ...]:
    """What one of `meta_stages` is given for a micro-batch: (x_t, t, labels), or the message of the stage before."""
    entering = stage.entering if isinstance(stage, StageModule) else None
    if entering is None:
        return meta_inputs(config.model, layout.micro_batch_size)
    dtype = DTYPES[config.train.precision]
    return torch.empty(layout.micro_batch_size, entering.numel, dtype=dtype, device="meta", requires_grad=True)
