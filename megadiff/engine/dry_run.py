"""What `--dry-run` prints: settings and the costs of the layout in closed form; starts no process group."""

from collections.abc import Sequence

from megadiff.config.layout import Layout, resolve_layout
from megadiff.config.load import to_yaml
from megadiff.config.networks import schedule_shift
from megadiff.config.progressive import training_stages
from megadiff.config.schema import Config
from megadiff.models.flops import layer_flops, training_flops
from megadiff.parallel.stage import rank_of_stage, stage_layers
from megadiff.planner.activations import activation_bytes
from megadiff.planner.memory import Memory, StageParameters, rank_memory, stage_parameters
from megadiff.planner.schedules import FLOPS_PER_SECOND, LINK, schedule_costs
from megadiff.planner.traffic import pipeline_hops, step_traffic

Row = Sequence[str]


def describe(config: Config, layout: Layout) -> str:
    """The resolved settings as YAML, then tables of the layout, its stages, schedules, memory and communication.

    Args:
        config: a complete, checked config.
        layout: of the number of processes that the run would have.
    """
    ranks, held = stage_parameters(config), activation_bytes(config, layout)
    sections = [
        to_yaml(config).rstrip(),
        _layout_section(config, layout, ranks),
        *([_progress_section(config, layout.world_size)] if config.train.progressive else []),
        _stage_section(config, layout, ranks, held),
        *([_schedule_section(config, layout, held)] if layout.pipeline > 1 else []),
        _memory_section(config, layout, ranks),
        _traffic_section(config, layout, ranks),
    ]
    return "\n\n".join(sections)


def _layout_section(config: Config, layout: Layout, ranks: list[StageParameters]) -> str:
    parameters = sum(layout.tensor * rank.sharded + rank.replicated for rank in ranks)
    sequence = ", sequence parallel" if config.parallel.sequence_parallel else ""
    degrees = f"{layout.tensor} tensor x {layout.pipeline} pipeline x {layout.data} data"
    factors = f"{layout.micro_batch_size} micro-batch x {layout.accumulation} accumulation x {layout.data} data"
    lines = {
        "layout": f"{layout.world_size} processes = {degrees}, ZeRO {layout.zero_stage}{sequence}",
        "batch": f"{layout.global_batch_size} samples = {factors}",
        "parameters": f"{parameters:,} in the whole network, {config.train.precision}",
        "operations": f"{training_flops(config.model) / 1e9:,.2f} GFLOP a training sample",
    }
    return "\n".join(f"{label:<10}  {text}" for label, text in lines.items())


def _progress_section(config: Config, world_size: int) -> str:
    """The stages of progressive training; the tables that follow are those of the run's full size."""
    rows: list[Row] = [("training stage", "steps", "size", "batch", "shift", "lr", "GFLOP a sample", "activations")]
    weighted, last = 0.0, 0
    for stage in training_stages(config):
        layout = resolve_layout(stage.config, world_size)
        steps, last = stage.end_step - stage.first_step, max(activation_bytes(stage.config, layout))
        weighted += steps * last / config.train.steps
        rows.append(
            (
                str(stage.number),
                f"{stage.first_step} ... {stage.end_step}",
                str(stage.config.model.input_size),
                str(layout.global_batch_size),
                f"{schedule_shift(stage.config):.3g}",
                f"{stage.config.optimizer.lr:.3g}",
                f"{training_flops(stage.config.model) / 1e9:,.2f}",
                readable_bytes(last),
            )
        )
    saved = f"mean over the steps {readable_bytes(round(weighted))}, {weighted / last - 1:+.0%} against the last stage"
    return f"{table(rows)}\nactivations of a micro-batch on the fullest pipeline stage: {saved}"


def _stage_section(config: Config, layout: Layout, ranks: list[StageParameters], held: list[int]) -> str:
    costs, elements = layer_flops(config.model), {name: size for rank in ranks for name, size in rank.layers.items()}
    total = sum(costs.values())
    rows: list[Row] = [
        ("stage", "rank", "layers", "parameters", "GFLOP forward", "share", "activations", "to next rank")
    ]
    stages = stage_layers(config)
    sent = [hop.size for hop in pipeline_hops(config, layout)] + [0]
    for number, (names, activations) in enumerate(zip(stages, held, strict=True)):
        cost = sum(costs[name] for name in names)
        rows.append(
            (
                str(number),
                str(rank_of_stage(len(stages), layout.pipeline, number)),
                _span(names),
                f"{sum(elements[name] for name in names):,}",
                f"{cost / 1e9:,.3f}",
                f"{cost / total:.1%}",
                readable_bytes(activations),
                readable_bytes(sent[number]),
            )
        )
    return table(rows) + "\nactivations and bytes to the next rank are those of one micro-batch on one tensor rank"


def _span(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} ... {layers[-1]} ({len(layers)})"


def _schedule_section(config: Config, layout: Layout, held: list[int]) -> str:
    rows: list[Row] = [("schedule", "sent a micro-batch", "step", "bubble", "peak activations")]
    for cost in schedule_costs(config, layout, held):
        simulation = cost.simulation
        rows.append(
            (
                f"{cost.schedule} (this run)" if cost.is_run else cost.schedule,
                readable_bytes(cost.micro_batch_bytes),
                f"{simulation.step_seconds:.4g} s",
                f"{simulation.bubble:.1%}",
                readable_bytes(max(simulation.peak_activations)),
            )
        )
    where = f"{FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s a device and {LINK.bytes_per_second / 1e9:.0f} GB/s a link"
    return (
        f"{table(rows)}\nsimulated with {where}; only 1f1b and folded can be run, the others are for comparison, in\n"
        "their orders for equal stages"
    )


def _memory_section(config: Config, layout: Layout, ranks: list[StageParameters]) -> str:
    names = list(Memory.__dataclass_fields__)
    rows: list[Row] = [("memory of a rank", "parameters", "of them cut", *names, "total")]
    for number, parameters in enumerate(ranks):
        memory = rank_memory(config, layout, parameters)
        sizes = [getattr(memory, name) for name in names]
        elements = (f"{parameters.total:,}", f"{parameters.sharded:,}")
        rows.append((_rank_name(layout, number), *elements, *map(readable_bytes, sizes), readable_bytes(memory.total)))
    return table(rows) + "\nwithout activations and communication buffers"


def _traffic_section(config: Config, layout: Layout, ranks: list[StageParameters]) -> str:
    rows: list[Row] = [("bytes of a rank in a step", "operation", "ranks", "payload")]
    for number, parameters in enumerate(ranks):
        traffic = step_traffic(config, layout, number, parameters)
        for transfer, size in sorted(traffic.items()):
            rows.append((_rank_name(layout, number), transfer.kind, str(transfer.group_size), readable_bytes(size)))
    return table(rows if len(rows) > 1 else [*rows, ("none", "", "", "")])


def _rank_name(layout: Layout, number: int) -> str:
    return f"pipeline rank {number}" if layout.pipeline > 1 else "every rank"


def readable_bytes(size: int) -> str:
    """A number of bytes with three significant digits and a binary unit."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    # From 999.5 on three digits would be written with an exponent.
    return f"{value:.0f} {unit}" if unit == "B" or value >= 999.5 else f"{value:.3g} {unit}"


def table(rows: Sequence[Row]) -> str:
    """Columns as wide as their widest cell, the first left-aligned and numbers right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    numeric = [column[-1][:1].isdigit() for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right and index else cell.ljust(width)
            for index, (cell, width, right) in enumerate(zip(row, widths, numeric, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
