"""What each pipeline schedule would cost a layout: bytes, idle time and activations, from a simulation."""

from dataclasses import dataclass
from typing import Literal

from megadiff.config.layout import Layout, is_folded
from megadiff.config.schema import Config
from megadiff.errors import PlanError
from megadiff.models.flops import layer_flops
from megadiff.parallel.schedules import Schedule
from megadiff.parallel.simulate import Link, Simulation, StageCost, simulate
from megadiff.parallel.stage import stage_layers
from megadiff.planner.activations import activation_bytes
from megadiff.planner.traffic import pipeline_hops

# A nominal device and link: 40 % of the dense half-precision peak of an A100, and 200 Gbit/s InfiniBand.
FLOPS_PER_SECOND = 0.4 * 312e12
LINK = Link(bytes_per_second=25e9, latency=5e-6)

# The schedules of DeepSpeed, then others on the same two partitions, for comparison.
_ON_PLAIN_STAGES: tuple[Schedule, ...] = ("1f1b", "gpipe", "zb-h1", "zb-h2")
_ON_FOLDED_STAGES: tuple[Schedule, ...] = ("folded", "zb-v", "dualpipev")
_FOLDED_NEEDS = 2  # micro-batches for each rank


@dataclass(frozen=True)
class ScheduleCost:
    """A schedule on a layout.

    Attributes:
        schedule: its name.
        is_run: the config runs this one.
        micro_batch_bytes: what all ranks together send for one micro-batch.
        simulation: of one step.
    """

    schedule: Schedule
    is_run: bool
    micro_batch_bytes: int
    simulation: Simulation


def schedule_costs(config: Config, layout: Layout, held: list[int]) -> list[ScheduleCost]:
    """All schedules that the layout's number of micro-batches allows, on the automatic or the given partition.

    Args:
        config: with a pipeline.
        layout: of the number of processes that the run would have.
        held: `activation_bytes(config, layout)`.
    """
    costs = []
    for runs_folded, schedules in ((False, _ON_PLAIN_STAGES), (True, _ON_FOLDED_STAGES)):
        if runs_folded and not _can_fold(config, layout):
            continue
        changed = _with_schedule(config, "folded" if runs_folded else "1f1b")
        own = held if runs_folded == is_folded(config) else activation_bytes(changed, layout)
        stages = stage_costs(changed, layout, own)
        sent = 2 * sum(hop.size for hop in pipeline_hops(changed, layout))
        for name in schedules:
            simulation = simulate(name, stages, layout.pipeline, layout.accumulation, LINK)
            is_run = name == ("folded" if is_folded(config) else "1f1b")
            costs.append(ScheduleCost(name, is_run, sent, simulation))
    return costs


def _can_fold(config: Config, layout: Layout) -> bool:
    """Whether there are micro-batches enough, and cuts that part no skip."""
    if layout.accumulation < _FOLDED_NEEDS * layout.pipeline:
        return False
    try:
        stage_layers(_with_schedule(config, "folded"))
    except PlanError:
        return False
    return True


def _with_schedule(config: Config, schedule: Literal["1f1b", "folded"]) -> Config:
    """The config under another schedule; a given partition holds for its own schedule only."""
    keeps = is_folded(config) == (schedule == "folded")
    partition = config.parallel.partition if keeps else ()
    parallel = config.parallel.model_copy(update={"pipeline_schedule": schedule, "partition": partition})
    return config.model_copy(update={"parallel": parallel})


def stage_costs(config: Config, layout: Layout, held: list[int]) -> list[StageCost]:
    """Costs of every stage for one micro-batch of one tensor rank on the nominal device.

    The backward pass does twice the forward's operations, half of them for the weights, and with full checkpointing the
    forward's once more.
    """
    flops = layer_flops(config.model)
    sent = [hop.size for hop in pipeline_hops(config, layout)] + [0]
    again = 1 if config.train.activation_checkpointing == "full" else 0
    costs = []
    for names, activations, boundary in zip(stage_layers(config), held, sent, strict=True):
        operations = layout.micro_batch_size * sum(flops[name] for name in names) / layout.tensor
        seconds = operations / FLOPS_PER_SECOND
        costs.append(StageCost(seconds, (2 + again) * seconds, seconds, activations, boundary))
    return costs
