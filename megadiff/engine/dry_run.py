"""What `--dry-run` prints: settings and the costs of the layout in closed form; starts no process group."""

from collections.abc import Sequence

from megadiff.config.layout import Layout
from megadiff.config.load import to_yaml
from megadiff.config.schema import Config
from megadiff.models.flops import layer_flops, training_flops
from megadiff.planner.memory import Memory, StageParameters, rank_memory, stage_parameters
from megadiff.planner.traffic import step_traffic

Row = Sequence[str]


def describe(config: Config, layout: Layout) -> str:
    """The resolved settings as YAML, then tables of the layout, its stages, memory and communication.

    Args:
        config: a complete, checked config.
        layout: of the number of processes that the run would have.
    """
    stages = stage_parameters(config)
    sections = [
        to_yaml(config).rstrip(),
        _layout_section(config, layout, stages),
        _stage_section(config, stages),
        _memory_section(config, layout, stages),
        _traffic_section(config, layout, stages),
    ]
    return "\n\n".join(sections)


def _layout_section(config: Config, layout: Layout, stages: list[StageParameters]) -> str:
    parameters = sum(layout.tensor * stage.sharded + stage.replicated for stage in stages)
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


def _stage_section(config: Config, stages: list[StageParameters]) -> str:
    costs = layer_flops(config.model)
    total = sum(costs.values())
    rows: list[Row] = [("stage", "layers", "parameters a rank", "of them cut", "GFLOP forward", "share")]
    for number, stage in enumerate(stages):
        cost = sum(costs[name] for name in stage.layers)
        rows.append(
            (
                str(number),
                _span(stage.layers),
                f"{stage.total:,}",
                f"{stage.sharded:,}",
                f"{cost / 1e9:,.3f}",
                f"{cost / total:.1%}",
            )
        )
    return table(rows)


def _span(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} ... {layers[-1]} ({len(layers)})"


def _memory_section(config: Config, layout: Layout, stages: list[StageParameters]) -> str:
    rows: list[Row] = [("memory of a rank", *Memory.__dataclass_fields__, "total")]
    for number, stage in enumerate(stages):
        memory = rank_memory(config, layout, stage)
        sizes = [getattr(memory, name) for name in Memory.__dataclass_fields__]
        rows.append((f"stage {number}", *map(readable_bytes, sizes), readable_bytes(memory.total)))
    return table(rows) + "\nwithout activations and communication buffers"


def _traffic_section(config: Config, layout: Layout, stages: list[StageParameters]) -> str:
    rows: list[Row] = [("bytes of a rank in a step", "operation", "ranks", "payload")]
    for number, stage in enumerate(stages):
        traffic = step_traffic(config, layout, number, stage)
        for transfer, size in sorted(traffic.items()):
            rows.append((f"stage {number}", transfer.kind, str(transfer.group_size), readable_bytes(size)))
    return table(rows if len(rows) > 1 else [*rows, ("none", "", "", "")])


def readable_bytes(size: int) -> str:
    """A number of bytes with three significant digits and a binary unit."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


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
