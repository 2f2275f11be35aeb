"""Samples a second of one training process, and what a step keeps (UNet) or moves between two processes (DiT).

The peer is a plain PyTorch loop over diffusers' network of the same size, DiTTransformer2DModel or UNet2DModel: same
batch, float32, as many threads, the same objective without our engine, clipping at the same norm, AdamW. Neither keeps
an average of its weights. Both train in turns in one process, so that a busy machine slows both.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from peers import Step, peer_network, peer_step, saved_bytes
from report import Row, add_report_arguments, print_rows, write_json
from torch import Tensor, nn
from two_processes import run_on_two

from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config
from megadiff.config.presets import MODEL_PRESETS
from megadiff.config.schema import Config
from megadiff.data.batch import Batch
from megadiff.dist import process
from megadiff.dist.process import Process
from megadiff.dist.traffic import count_traffic
from megadiff.engine.build import build_engine
from megadiff.engine.engine import Engine
from megadiff.planner.memory import stage_parameters
from megadiff.planner.traffic import SCALAR_ELEMENTS, step_traffic


@dataclass(frozen=True)
class Subject:
    """A network to measure.

    Attributes:
        preset, quick_preset: of the model, the latter for `--quick`.
        batch_size, rounds, threads: of a run without flags; each number of threads gets rows of its own.
        must, aim: limits of our samples a second by the peer's.
        note: what the peer is.
    """

    preset: str
    quick_preset: str
    batch_size: int
    rounds: int
    threads: tuple[int, ...]
    must: float
    aim: float
    note: str


RATIO_NOTE = "ours / other = samples a second of megadiff (DeepSpeed, ZeRO 0) / of a plain loop over diffusers'"
SUBJECTS: Mapping[str, Subject] = {
    "dit": Subject(
        preset="dit-small-cpu",
        quick_preset="dit-tiny-test",
        batch_size=32,
        rounds=25,
        threads=(1,),
        must=1.0,
        aim=1.2,
        note=f"{RATIO_NOTE} DiTTransformer2DModel, medians; the peer carries a time and label embedder in every block",
    ),
    "unet": Subject(
        preset="unet-cifar",
        quick_preset="unet-tiny-test",
        batch_size=16,
        rounds=7,
        threads=(1, 2),
        must=1.1,
        aim=1.3,
        note=f"{RATIO_NOTE} UNet2DModel, medians; convolutions, three quarters of a step, are oneDNN's on both sides",
    ),
}
SAVED_NOTE = "counted by autograd's hooks: each storage once, without parameters and buffers"
TRAFFIC_NOTE = "bytes between ranks: counted / closed form of one step, both without the scalar sums of loss and norm"
LAYOUTS: dict[str, dict[str, object]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 + sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dit", choices=SUBJECTS, help="kind of the network")
    parser.add_argument("--preset", choices=MODEL_PRESETS, help="default: dit-small-cpu, unet-cifar")
    parser.add_argument("--batch-size", type=int, help="default: 32 of a DiT, 16 of a UNet")
    parser.add_argument("--rounds", type=int, help="turns that each side takes")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn")
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads, each with rows of its own")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    subject = SUBJECTS[arguments.model]
    if arguments.preset is not None and MODEL_PRESETS[arguments.preset]["name"] != arguments.model:
        parser.error(f"--preset {arguments.preset} is no {arguments.model}; pass --model as well")
    choices = ("preset", "batch_size", "rounds")
    given: dict[str, Any] = {name: value for name in choices if (value := getattr(arguments, name)) is not None}
    if arguments.threads is not None:
        given["threads"] = tuple(arguments.threads)
    if arguments.quick:
        given = {"preset": subject.quick_preset, "batch_size": 8, "rounds": 2, "threads": (1,)}
    rows = list(process_rows(replace(subject, **given), arguments.steps))
    if arguments.model == "dit":
        rows += traffic_rows()
    print_rows(rows)
    if arguments.json is not None:
        write_json(rows, arguments.json)


def process_rows(subject: Subject, steps: int) -> Iterator[Row]:
    """Builds both sides and measures them on each number of threads."""
    config = run_config(subject.preset, subject.batch_size)
    engine = build_engine(config, resolve_layout(config, 1), process.start(timeout_seconds=600))
    peer = peer_network(config.model)
    sides = {"ours": our_step(engine), "peer": peer_step(config, peer)}
    for number in subject.threads:
        torch.set_num_threads(number)
        yield from speed_rows(subject, config, sides, steps)
    if config.model.name == "unet":
        yield activation_row(engine, peer)
    process.stop()


def run_config(preset: str, batch_size: int, **parallel: object) -> Config:
    """A run of a preset network with everything that the peer does not do switched off."""
    settings: dict[str, object] = {
        "model.preset": preset,
        "data.name": "ids",
        "data.num_samples": 4 * batch_size,
        "train.global_batch_size": batch_size,
        "optimizer.warmup_steps": 1,
        "ema.enabled": False,
    }
    return load_config(None, settings | {f"parallel.{key}": value for key, value in parallel.items()})


def speed_rows(subject: Subject, config: Config, sides: Mapping[str, Step], steps: int) -> list[Row]:
    """Trains both sides in turns and compares the medians of their samples a second."""
    batch_size = config.train.global_batch_size
    wall: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    position = 0
    for turn in range(subject.rounds + 2):
        images, labels = random_batch(config, turn)
        for name in list(sides) if turn % 2 else list(sides)[::-1]:
            started, started_busy = time.perf_counter(), time.process_time()
            for _ in range(steps):
                sides[name](images, labels, position)
            if turn >= 2:  # the first turns warm up
                wall[name].append(steps * batch_size / (time.perf_counter() - started))
                busy[name].append(steps * batch_size / (time.process_time() - started_busy))
        position += batch_size
    threads = torch.get_num_threads()
    size = f"{config.model.preset}, batch {batch_size}, fp32, {threads} thread{'s' if threads > 1 else ''}"
    return [
        _speed_row(f"training ({size})", wall, subject.must, subject.aim, subject.note),
        _speed_row("the same by CPU time", busy, note="leaves out what other programs took from the core"),
    ]


def _speed_row(
    name: str, rates: dict[str, list[float]], must: float | None = None, aim: float | None = None, note: str = ""
) -> Row:
    ours, peer = statistics.median(rates["ours"]), statistics.median(rates["peer"])
    return Row(name, ours, peer, "samples/s", ours / peer, must, aim, note=note)


def random_batch(config: Config, seed: int) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W) float32 and labels (B,) int64."""
    generator = torch.Generator().manual_seed(seed)
    model, batch = config.model, config.train.global_batch_size
    images = torch.randn(batch, model.in_channels, model.input_size, model.input_size, generator=generator)
    return images, torch.randint(model.num_classes, (batch,), generator=generator)


def our_step(engine: Engine) -> Step:
    """One step of the engine; the third argument is the position of the first sample."""

    def step(images: Tensor, labels: Tensor, position: int) -> None:
        engine.train_step([Batch(images, labels, torch.arange(position, position + len(images)), None)])

    return step


def activation_row(engine: Engine, peer: nn.Module) -> Row:
    """Bytes that a forward pass of each side saves for its backward pass."""
    images, labels = random_batch(engine.config, 0)
    t = torch.full_like(labels, 500)
    engine.chain.dropout_seeds = itertools.repeat(0)
    with saved_bytes(engine.chain) as ours:
        engine.chain((images, t, labels))
    with saved_bytes(peer) as other:
        peer(images, timestep=t, class_labels=labels)
    kept, by_peer = ours.total / 2**20, other.total / 2**20
    name = f"activations saved for backward, batch {len(images)}"
    return Row(name, kept, by_peer, "MiB", kept / by_peer, must=0.8, aim=0.65, lower_is_better=True, note=SAVED_NOTE)


def traffic_rows() -> Iterator[Row]:
    """Bytes of one step on two processes: counted by ours, predicted as the other figure."""
    for name, settings in LAYOUTS.items():
        config = run_config("dit-tiny-test", 8, **settings)
        counted = sum(run_on_two(count_bytes, config))
        layout, stages = resolve_layout(config, 2), stage_parameters(config)
        of_stages = [sum(step_traffic(config, layout, n, stage).values()) for n, stage in enumerate(stages)]
        predicted = sum(of_stages) * 2 // len(stages)
        note = TRAFFIC_NOTE if name == "dp2" else ""
        yield Row(
            f"bytes of a step, {name}",
            counted,
            predicted,
            "B",
            counted / predicted,
            1.0,
            exact=True,
            note=note,
        )


def count_bytes(this: Process, config: Config) -> int:
    """The bytes that this process hands to torch.distributed in its third step."""
    layout = resolve_layout(config, this.world_size)
    engine = build_engine(config, layout, this)
    images, labels = random_batch(config, 0)
    size = layout.micro_batch_size
    mine = torch.arange(size) + size * engine.grid.data.index
    micro_batches = [
        Batch(images[mine], labels[mine], mine + size * layout.data * number) for number in range(layout.accumulation)
    ]
    for _ in range(2):  # a pipeline sends shapes in its first step
        engine.train_step(micro_batches)
    with count_traffic(SCALAR_ELEMENTS) as traffic:
        engine.train_step(micro_batches)
    return traffic.payload.total()


if __name__ == "__main__":
    main()
