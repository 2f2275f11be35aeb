"""Bytes that a rank holds for its parameters: weights, gradients, masters, optimizer state, average.

Left out: activations, communication buffers (DeepSpeed's buckets), the fixed position table, the padding of
ZeRO 1 and 2 (each of two parameter groups to a multiple of 2 x data ranks: below 4 elements a rank), and at
ZeRO 2 the foreign part of a gradient that lies across a partition's border, which both sides keep whole.
ZeRO 3 pads every parameter to a multiple of the data ranks: that is counted.
"""

from dataclasses import dataclass, fields

from megadiff.config.layout import Layout
from megadiff.config.schema import Config, OptimizerConfig
from megadiff.parallel.stage import DTYPES, stage_layers, stages_of_rank
from megadiff.planner.meta_stage import sharded_layers, tensor_axis


@dataclass(frozen=True)
class StageParameters:
    """The parameters that every tensor rank of one pipeline rank holds.

    Attributes:
        layers: elements of each of its layers, by name and in order.
        sharded: elements of parameters that tensor parallelism cuts, after the cut.
        replicated: elements of parameters that every tensor rank holds whole.
        sizes: elements of every single parameter on this rank.
    """

    layers: dict[str, int]
    sharded: int
    replicated: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.sharded + self.replicated


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by class, in the order of a table's columns.

    `masters` is 0 at ZeRO 0, where the weights themselves are in full precision.
    """

    weights: int
    gradients: int
    masters: int
    optimizer: int
    average: int

    @property
    def total(self) -> int:
        return sum(getattr(self, item.name) for item in fields(self))


def rank_layers(config: Config) -> list[tuple[str, ...]]:
    """The names of the layers that every pipeline rank holds."""
    stages, ranks = stage_layers(config), config.parallel.pipeline_model_parallel_size
    own = [stages_of_rank(len(stages), ranks, rank) for rank in range(ranks)]
    return [tuple(name for number in numbers for name in stages[number]) for numbers in own]


def stage_parameters(config: Config) -> list[StageParameters]:
    """The parameters of every pipeline rank, read off the sharded network on the meta device."""
    stages = []
    for layers in rank_layers(config):
        chain, sharding = sharded_layers(config, layers, tensor_axis(config.parallel.tensor_model_parallel_size))
        sizes = {name: parameter.numel() for name, parameter in chain.named_parameters()}
        sharded = sum(sizes[name] for name in sharding.slices)
        by_layer = {name: sum(part.numel() for part in chain.layer(name).parameters()) for name in layers}
        stages.append(StageParameters(by_layer, sharded, sum(sizes.values()) - sharded, tuple(sizes.values())))
    return stages


def num_state_tensors(optimizer: OptimizerConfig) -> int:
    """State tensors of a parameter's size that the optimizer keeps: AdamW's two moments, SGD's momentum."""
    return (1 if optimizer.momentum > 0 else 0) if optimizer.name == "sgd" else 2


def rank_memory(config: Config, layout: Layout, stage: StageParameters) -> Memory:
    """Bytes of a rank of a stage at the moment when its gradients are complete.

    Args:
        config: precision, optimizer and average.
        layout: its data degree and ZeRO stage cut what is not needed whole.
        stage: one of `stage_parameters(config)`.
    """
    width = DTYPES[config.train.precision].itemsize
    exact = max(width, 4)
    zero = layout.zero_stage
    owned = owned_elements(stage, layout)
    return Memory(
        weights=width * (owned if zero == 3 else stage.total),
        gradients=gradient_bytes(config, zero, owned, stage.total),
        masters=exact * owned if zero else 0,
        optimizer=exact * owned * num_state_tensors(config.optimizer),
        average=exact * owned if config.ema.enabled else 0,
    )


def owned_elements(stage: StageParameters, layout: Layout) -> int:
    """Elements whose optimizer step a rank takes."""
    if layout.zero_stage == 0:
        return stage.total
    if layout.zero_stage == 3:
        return sum(-(-size // layout.data) for size in stage.sizes)
    return -(-stage.total // layout.data)


def gradient_bytes(config: Config, zero: int, owned: int, whole: int) -> int:
    """Bytes of the sums of gradients that a rank keeps over the micro-batches.

    They are in `data_types.grad_accum_dtype` of the DeepSpeed config, for which the engine sets float32 in bf16
    runs. Where ZeRO 1 sums in another type than the weights', the last micro-batch's own gradients are held too.

    Args:
        config: precision and DeepSpeed config.
        zero: ZeRO stage, which cuts gradients from 2 on.
        owned: elements whose optimizer step this rank takes.
        whole: elements of all its parameters.
    """
    precision = config.train.precision
    default = "fp32" if precision == "bf16" else precision
    summed = DTYPES[config.deepspeed.get("data_types", {}).get("grad_accum_dtype", default)].itemsize
    if zero >= 2:
        return summed * owned
    own = DTYPES[precision].itemsize if zero == 1 and summed != DTYPES[precision].itemsize else 0
    return (summed + own) * whole
