"""Builds this rank's part of the network: the layers of its stages, sharded by the plan, with their initial values."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megadiff.config.layout import is_folded
from megadiff.config.schema import Config
from megadiff.dist.grid import Grid
from megadiff.models import long_skips, materialize, meta_chain
from megadiff.models.chain import Chain
from megadiff.models.flops import layer_flops
from megadiff.ops.backends import Backends
from megadiff.parallel.boundary import Boundary, boundary_before
from megadiff.parallel.partition import fold_layers, partition_layers
from megadiff.parallel.plan import Sharding, apply_plan, check_plan, sum_partial_gradients
from megadiff.parallel.plans import plan_for
from megadiff.parallel.skips import SkipStore

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class StageModule(nn.Module):
    """Consecutive layers between two boundaries.

    Attributes:
        entering: how what the stage before sends is packed; None for the first stage.
        leaving: how the next stage expects what this one sends; None for the last.
    """

    def __init__(
        self, chain: Chain, entering: Boundary | None, leaving: Boundary | None, store: SkipStore | None
    ) -> None:
        super().__init__()
        self.chain, self.entering, self.leaving, self.store = chain, entering, leaving, store

    def forward(self, state: Tensor | tuple[Tensor, ...]) -> Tensor:
        """From (x_t, t, labels) or a packed state (B, entering.numel) to (B, leaving.numel) or the network's output."""
        if self.entering is not None:
            assert isinstance(state, Tensor), "a stage after the first receives one message"
            state = self.entering.unpack(state)
        if self.store is not None and self.chain.incoming:
            assert isinstance(state, tuple), "a state"
            state = self.store.take(state)
        state = self.chain(state)
        if self.leaving is None:
            assert isinstance(state, Tensor), "the head gives one tensor"
            return state
        assert isinstance(state, tuple), "a state"
        count = len(self.leaving.shapes)
        if len(state) > count:
            assert self.store is not None, "skips without a place"
            state = self.store.leave(state[:count], state[count:])
        return self.leaving.pack(state)


@dataclass(frozen=True)
class Stage:
    """The layers that this rank holds and how they are sharded.

    Attributes:
        chain: all of them.
        sharding: what the plan did.
        modules: the pipeline stages that they make up: none without a pipeline, two where it is folded, else one.
    """

    chain: Chain
    sharding: Sharding
    modules: tuple[StageModule, ...] = ()

    def chains(self) -> tuple[Chain, ...]:
        """The chains whose forward passes run."""
        return tuple(module.chain for module in self.modules) or (self.chain,)


def stage_layers(config: Config) -> list[tuple[str, ...]]:
    """The names of the layers of every pipeline stage; a folded pipeline has two stages a rank."""
    parallel, model = config.parallel, config.model
    costs = layer_flops(model)
    ranks = parallel.pipeline_model_parallel_size
    if ranks == 1:
        return [tuple(costs)]
    sizes = {name: boundary_before(config, name).numel for name in list(costs)[1:]}
    if is_folded(config):
        return fold_layers(costs, ranks, long_skips(model), parallel.partition, sizes)
    return partition_layers(costs, ranks, parallel.partition, sizes)


def stages_of_rank(num_stages: int, num_ranks: int, rank: int) -> tuple[int, ...]:
    """The numbers of the stages that a pipeline rank runs."""
    return (rank,) if num_stages == num_ranks else (rank, num_stages - 1 - rank)


def rank_of_stage(num_stages: int, num_ranks: int, stage: int) -> int:
    """The pipeline rank that runs a stage."""
    return stage if stage < num_ranks else num_stages - 1 - stage


def build_stage(config: Config, grid: Grid, device: torch.device, dtype: torch.dtype) -> Stage:
    """Builds the stages of this rank.

    Raises:
        PlanError: the plan or the partition does not fit the network.
    """
    train, model, plan = config.train, config.model, plan_for(config.model)
    backends = Backends(train.attention_backend, train.kernels, train.norm_backend)
    check_plan(plan, meta_chain(model, backends))
    stages = stage_layers(config)
    own = stages_of_rank(len(stages), grid.pipe.degree, grid.pipe.index)
    chain = meta_chain(model, backends, [name for number in own for name in stages[number]])
    sharding = apply_plan(chain, plan, grid.tensor, config.parallel.sequence_parallel)
    materialize(chain, model, train.seed, dtype, device, sharding.full_shapes(), sharding.local_part)
    sum_partial_gradients(chain, sharding.partial, grid.tensor)
    chain.set_recompute(train.activation_checkpointing, train.activation_checkpoint_every_blocks)
    if train.compile:
        chain.compile_blocks()
    return Stage(chain, sharding, stage_modules(config, chain, stages, own) if grid.pipe.degree > 1 else ())


def stage_modules(
    config: Config, chain: Chain, stages: list[tuple[str, ...]], own: tuple[int, ...]
) -> tuple[StageModule, ...]:
    """The pipeline stages of a rank.

    Args:
        config: decides where skips go.
        chain: all layers of the rank.
        stages: `stage_layers(config)`.
        own: the numbers of this rank's stages.
    """
    store = SkipStore() if is_folded(config) else None
    boundaries = [None, *(boundary_before(config, names[0]) for names in stages[1:]), None]
    return tuple(
        StageModule(
            chain.part(stages[number], skips_stay=store is not None), boundaries[number], boundaries[number + 1], store
        )
        for number in own
    )
