"""The simulated step of a UNet on two pipeline ranks against the measured one, under both schedules.

The simulation is fed with what can be measured apart: forward and backward seconds of every stage alone in one process
of one thread, the link by a ping-pong of two processes, and what stands around the passes of a step (noise, clipping,
optimizer). The two processes that train have one thread each, and a core each on a quiet machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from report import Row, add_report_arguments, print_rows, write_json
from torch import Tensor
from two_processes import run_on_two

from megadiff.config.layout import Layout, resolve_layout
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.data.batch import Batch
from megadiff.diffusion.objective import TrainingInputs
from megadiff.dist.process import Process
from megadiff.engine.build import build_engine, make_objective
from megadiff.engine.optimizer import make_optimizer
from megadiff.engine.runners import PipelineLoss
from megadiff.models import materialize, meta_chain
from megadiff.models.chain import Chain
from megadiff.ops.backends import Backends
from megadiff.parallel.schedules import Schedule
from megadiff.parallel.simulate import Link, StageCost, simulate
from megadiff.parallel.stage import StageModule, stage_layers, stage_modules, stages_of_rank
from megadiff.planner.activations import activation_bytes
from megadiff.planner.traffic import pipeline_hops

NUM_RANKS = 2
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "folded")
WARMUP = 2
PING_PONGS = 50
NOTE = "ours = simulated, other = measured, the median of steps; ratio = 1 + |simulated / measured - 1|"


@dataclass(frozen=True)
class Effort:
    """The run: preset, samples of a micro-batch, micro-batches of a step, and how often things are measured."""

    preset: str = "unet-small-cpu"
    micro_batch_size: int = 8
    micro_batches: int = 8
    repeats: int = 15


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=Effort.repeats, help="measured steps, and passes of each stage")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    effort = Effort(repeats=arguments.repeats)
    if arguments.quick:
        effort = Effort("unet-tiny-test", micro_batch_size=2, micro_batches=4, repeats=3)
    torch.set_num_threads(1)
    rows = [row for schedule in SCHEDULES for row in schedule_rows(schedule, effort)]
    print_rows(rows)
    if arguments.json is not None:
        write_json(rows, arguments.json)


def schedule_rows(schedule: Schedule, effort: Effort) -> list[Row]:
    """The step of one schedule, and for the reader what it was simulated from."""
    config = run_config(schedule, effort)
    layout = resolve_layout(config, NUM_RANKS)
    alone = measure_alone(config, layout, effort.repeats)
    ranks = run_on_two(measure_together, config, effort.repeats)
    link = ranks[0].link
    simulation = simulate(schedule, alone.stages, NUM_RANKS, layout.accumulation, link)
    simulated = simulation.step_seconds + alone.around
    measured = statistics.median(map(max, zip(*(rank.steps for rank in ranks), strict=True)))
    ratio = 1 + abs(simulated / measured - 1)
    size = f"{effort.preset}, {layout.accumulation} micro-batches of {layout.micro_batch_size}"
    passes = ", ".join(f"{1e3 * stage.forward:.1f} + {1e3 * stage.backward:.1f}" for stage in alone.stages)
    note = (
        f"{NOTE}; from passes of {passes} ms by stage, {1e3 * alone.around:.1f} ms around them, a link of "
        f"{link.bytes_per_second / 1e9:.2f} GB/s and {1e6 * link.latency:.0f} us; bubble {simulation.bubble:.1%}"
    )
    name = f"step of {schedule} on {NUM_RANKS} ranks ({size})"
    return [
        Row(name, 1e3 * simulated, 1e3 * measured, "ms", ratio, must=1.15, aim=1.08, lower_is_better=True, note=note)
    ]


def run_config(schedule: Schedule, effort: Effort) -> Config:
    """A run of the preset on two pipeline ranks."""
    batch_size = effort.micro_batch_size * effort.micro_batches
    return load_config(
        None,
        {
            "model.preset": effort.preset,
            "data.name": "ids",
            "data.num_samples": batch_size,
            "train.global_batch_size": batch_size,
            "train.micro_batch_size": effort.micro_batch_size,
            "optimizer.warmup_steps": 1,
            "ema.enabled": False,
            "parallel.pipeline_model_parallel_size": NUM_RANKS,
            "parallel.pipeline_schedule": schedule,
        },
    )


def random_batches(config: Config, layout: Layout) -> list[Batch]:
    """The micro-batches of a step."""
    generator, model, size = torch.Generator().manual_seed(0), config.model, layout.micro_batch_size
    shape = size, model.in_channels, model.input_size, model.input_size
    return [
        Batch(
            torch.randn(shape, generator=generator),
            torch.randint(model.num_classes, (size,), generator=generator),
            torch.arange(number * size, (number + 1) * size),
        )
        for number in range(layout.accumulation)
    ]


@dataclass(frozen=True)
class Alone:
    """What one process measures: the costs of the stages, and seconds of a step around its passes."""

    stages: list[StageCost]
    around: float


def measure_alone(config: Config, layout: Layout, repeats: int) -> Alone:
    """Times the stages one after the other on one micro-batch, and what else a step does."""
    chains, stages = build_stages(config)
    objective = make_objective(config)
    loss = PipelineLoss(objective, None)
    batches = random_batches(config, layout)

    def prepare() -> list[TrainingInputs]:
        return [objective.prepare(batch.images, batch.labels, batch.sample_ids, 0) for batch in batches]

    inputs = prepare()[0]
    times = [pass_seconds(stages, inputs, loss) for _ in range(WARMUP + repeats)][WARMUP:]
    passes = [[statistics.median(values) for values in zip(*stage, strict=True)] for stage in zip(*times, strict=True)]
    updates = [update(config, chain) for chain in chains]
    around = median_seconds(prepare, repeats) + max(median_seconds(step, repeats) for step in updates)
    sent = [hop.size for hop in pipeline_hops(config, layout)] + [0]
    # Neither schedule defers the weights' part of the backward pass, so it needs no figure of its own.
    costs = [
        StageCost(forward, backward, 0.0, held, size)
        for (forward, backward), held, size in zip(passes, activation_bytes(config, layout), sent, strict=True)
    ]
    return Alone(costs, around)


def build_stages(config: Config) -> tuple[list[Chain], list[StageModule]]:
    """The layers of every rank, and all stages in the order of the network."""
    layers, train = stage_layers(config), config.train
    backends = Backends(train.attention_backend, train.kernels, train.norm_backend)
    chains: list[Chain] = []
    modules: dict[int, StageModule] = {}
    for rank in range(NUM_RANKS):
        own = stages_of_rank(len(layers), NUM_RANKS, rank)
        chain = meta_chain(config.model, backends, [name for number in own for name in layers[number]])
        materialize(chain, config.model, train.seed)
        modules |= dict(zip(own, stage_modules(config, chain, layers, own), strict=True))
        chains.append(chain)
    return chains, [modules[number] for number in range(len(layers))]


def pass_seconds(
    stages: Sequence[StageModule], inputs: TrainingInputs, loss: PipelineLoss
) -> list[tuple[float, float]]:
    """Sends one micro-batch through all stages and back; (forward, backward) of each, as DeepSpeed runs them."""
    entered: list[Tensor | tuple[Tensor, ...]] = [(inputs.x_t, inputs.t, inputs.labels)]
    left: list[Tensor] = []
    forward, backward = [], []
    for number, stage in enumerate(stages):
        started = time.perf_counter()
        output = stage(entered[-1])
        if number + 1 == len(stages):
            output = loss(output, (inputs.target, inputs.weight))
        forward.append(time.perf_counter() - started)
        left.append(output)
        entered.append(output.detach().requires_grad_())
    gradient: Tensor | None = None
    for output, state in zip(reversed(left), reversed(entered[:-1]), strict=True):
        started = time.perf_counter()
        torch.autograd.backward(output, gradient)
        backward.append(time.perf_counter() - started)
        gradient = state.grad if isinstance(state, Tensor) else None
    return list(zip(forward, reversed(backward), strict=True))


def update(config: Config, chain: Chain) -> Callable[[], None]:
    """Clipping and optimizer step of a rank whose gradients are there."""
    optimizer = make_optimizer(config.optimizer, chain)
    parameters = list(chain.parameters())

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
        optimizer.step()

    return step


def median_seconds(act: Callable[[], object], repeats: int) -> float:
    """The median over some calls after two that warm up."""
    seconds = []
    for _ in range(WARMUP + repeats):
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARMUP:])


@dataclass(frozen=True)
class Together:
    """What one of two processes measures: seconds of each step, and the link between the two."""

    steps: list[float]
    link: Link


def measure_together(this: Process, config: Config, repeats: int) -> Together:
    """Trains on two processes; every step begins on both at once."""
    layout = resolve_layout(config, this.world_size)
    engine = build_engine(config, layout, this)
    batches = random_batches(config, layout)
    largest = max(hop.size for hop in pipeline_hops(config, layout))
    link = measure_link(this, largest)
    seconds = []
    for _ in range(WARMUP + repeats):
        dist.barrier()
        started = time.perf_counter()
        engine.train_step(batches)
        seconds.append(time.perf_counter() - started)
    return Together(seconds[WARMUP:], link)


def measure_link(this: Process, size: int) -> Link:
    """Latency from messages of one number, bandwidth from what a message of `size` bytes takes longer."""
    short, long = ping_pong(this, 1), ping_pong(this, size // 4)
    return Link(bytes_per_second=size / max(long - short, 1e-9), latency=short)


def ping_pong(this: Process, numel: int) -> float:
    """Seconds of one way of a message of float32."""
    message, other = torch.zeros(numel), 1 - this.rank

    def there_and_back() -> None:
        for sender in (0, 1):
            if this.rank == sender:
                dist.send(message, other)
            else:
                dist.recv(message, other)

    dist.barrier()
    return median_seconds(there_and_back, PING_PONGS) / 2


if __name__ == "__main__":
    main()
