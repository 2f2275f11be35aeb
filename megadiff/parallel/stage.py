"""Builds this rank's part of the network: the layers of its stage, sharded by the plan, with their initial values."""

from dataclasses import dataclass

import torch

from megadiff.config.schema import Config
from megadiff.dist.grid import Grid
from megadiff.models import chain_builders, materialize
from megadiff.models.chain import Chain
from megadiff.models.flops import layer_flops
from megadiff.ops.backends import Backends
from megadiff.parallel.partition import partition_layers
from megadiff.parallel.plan import Sharding, apply_plan, check_plan, sum_partial_gradients
from megadiff.parallel.plans import plan_for

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Stage:
    """The layers that this rank holds and how they are sharded."""

    chain: Chain
    sharding: Sharding


def stage_layers(config: Config) -> list[tuple[str, ...]]:
    """The names of the layers of every pipeline stage."""
    return partition_layers(
        layer_flops(config.model), config.parallel.pipeline_model_parallel_size, config.parallel.partition
    )


def build_stage(config: Config, grid: Grid, device: torch.device, dtype: torch.dtype) -> Stage:
    """Builds the stage of this rank.

    Raises:
        PlanError: the plan or the partition does not fit the network.
    """
    train = config.train
    builders = chain_builders(config.model, Backends(train.attention_backend, train.kernels, train.norm_backend))
    plan = plan_for(config.model)
    check_plan(plan, Chain(builders))
    chain = Chain(builders, only=stage_layers(config)[grid.pipe.index])
    sharding = apply_plan(chain, plan, grid.tensor, config.parallel.sequence_parallel)
    materialize(chain, config.model, config.train.seed, dtype, device, sharding.full_shapes(), sharding.local_part)
    sum_partial_gradients(chain, sharding.partial, grid.tensor)
    chain.set_recompute(config.train.activation_checkpointing, config.train.activation_checkpoint_every_blocks)
    if config.train.compile:
        chain.compile_blocks()
    return Stage(chain, sharding)
