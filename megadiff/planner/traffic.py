"""Bytes that one training step moves, in closed form, by kind of operation and size of group.

The payload of an operation is the whole tensor that it reduces, gathers, scatters or sends, on each rank that
takes part (what crosses a link is (n - 1) / n of it for a gather or scatter in a ring of n, and twice that
for a sum).

Left out, because they do not grow with the network: the sum of the squared norm, the pipeline's broadcast of
two loss values, ZeRO's overflow flag and norm (all at most `SCALAR_ELEMENTS` elements), and the shapes that a
pipeline sends once, before its first step.
"""

from collections import Counter
from typing import NamedTuple

import torch

from megadiff.config.layout import Layout
from megadiff.config.schema import Config
from megadiff.dist.traffic import Transfer
from megadiff.parallel.boundary import boundary_before
from megadiff.parallel.stage import DTYPES, rank_of_stage, stage_layers
from megadiff.planner.memory import StageParameters
from megadiff.planner.meta_stage import entering_state, meta_stages, tensor_axis

SCALAR_ELEMENTS = 2
_ZERO3_LIMIT = 10**9  # DeepSpeed's default of both limits that decide how long parameters stay gathered
Bytes = Counter[Transfer]


def step_traffic(config: Config, layout: Layout, rank: int, parameters: StageParameters) -> Bytes:
    """The payload bytes of one optimizer step on a pipeline rank.

    Exact without activation checkpointing, which repeats some of the forward collectives, and at ZeRO 3 where
    either all parameters stay gathered between forward and backward or none does.

    Args:
        config: sizes of the network and precision.
        layout: degrees, micro-batch, accumulation and ZeRO stage.
        rank: number of the pipeline rank.
        parameters: `stage_parameters(config)[rank]`.
    """
    per_micro_batch = tensor_traffic(config, layout, rank) + pipeline_traffic(config, layout, rank)
    total = Counter({key: bytes_ * layout.accumulation for key, bytes_ in per_micro_batch.items()})
    total += data_traffic(config, layout, parameters)
    if layout.world_size > 1:  # timestep, loss and squared gradient of every sample, float64
        total[Transfer("all_reduce", layout.world_size)] += 3 * 8 * layout.global_batch_size
    return total


def data_traffic(config: Config, layout: Layout, parameters: StageParameters) -> Bytes:
    """Gradients, and under ZeRO weights, between the data ranks in one step."""
    if layout.data == 1:
        return Counter()
    width = DTYPES[config.train.precision].itemsize
    whole = width * parameters.total
    if layout.zero_stage == 0:
        return Counter({Transfer("all_reduce", layout.data): whole})
    if layout.zero_stage == 3:
        padded = width * layout.data * sum(-(-size // layout.data) for size in parameters.sizes)
        return Counter(
            {
                Transfer("all_gather", layout.data): _gathers(config, parameters) * padded * layout.accumulation,
                Transfer("reduce_scatter", layout.data): padded * layout.accumulation,
            }
        )
    reductions = layout.accumulation if layout.zero_stage == 2 else 1
    return Counter(
        {
            Transfer("all_reduce", layout.data): whole * reductions,
            Transfer("all_gather", layout.data): whole,
        }
    )


def _gathers(config: Config, parameters: StageParameters) -> int:
    """How often ZeRO 3 gathers a parameter in a micro-batch: twice unless all may stay gathered."""
    zero = config.deepspeed.get("zero_optimization", {})
    limits = [zero.get(key, _ZERO3_LIMIT) for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance")]
    return 1 if parameters.total <= min(limits) else 2


def pipeline_traffic(config: Config, layout: Layout, rank: int) -> Bytes:
    """States forward and their gradients backward between neighbouring stages, for one micro-batch of one rank."""
    sends = receives = 0
    for hop in pipeline_hops(config, layout):
        if rank == hop.source:
            sends, receives = sends + hop.size, receives + hop.size
        if rank == hop.target:
            sends, receives = sends + hop.size, receives + hop.size
    return Counter({Transfer("send", 2): sends, Transfer("recv", 2): receives})


class Hop(NamedTuple):
    """One boundary between stages: from and to which pipeline rank, and the bytes of the state of a micro-batch."""

    source: int
    target: int
    size: int


def pipeline_hops(config: Config, layout: Layout) -> list[Hop]:
    """The boundaries between all stages in order; the turn of a folded pipeline stays on its rank and moves nothing."""
    stages = stage_layers(config)
    ranks = [rank_of_stage(len(stages), layout.pipeline, number) for number in range(len(stages))]
    width = DTYPES[config.train.precision].itemsize * layout.micro_batch_size
    return [
        Hop(source, target, 0 if source == target else width * boundary_before(config, names[0]).numel)
        for source, target, names in zip(ranks, ranks[1:], stages[1:], strict=False)
    ]


def tensor_traffic(config: Config, layout: Layout, rank: int) -> Bytes:
    """The collectives of tensor and sequence parallelism of one rank, for one micro-batch.

    They are written down in a forward and backward pass of its stages on the meta device.
    """
    if layout.tensor == 1:
        return Counter()
    train = config.train.model_copy(update={"activation_checkpointing": "none"})
    config = config.model_copy(update={"train": train})
    axis = tensor_axis(layout.tensor)
    outputs = [stage(entering_state(config, layout, stage)) for stage in meta_stages(config, rank, axis)]
    for output in reversed(outputs):
        output.backward(torch.empty_like(output))
    assert axis.ledger is not None, "the axis of a dry run"
    return axis.ledger.payload
