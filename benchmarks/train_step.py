"""Samples a second of one training process, and bytes that a step moves between two.

The peer is a plain PyTorch loop over diffusers' DiTTransformer2DModel of the same size: same batch, float32,
one thread, the same objective without our engine, clipping at the same norm, AdamW. Neither keeps an
average of its weights. Both train in turns in one process, so that a busy machine slows both.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.queues import SimpleQueue

import torch
from report import Row, add_report_arguments, print_rows, write_json
from torch import Tensor

from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config
from megadiff.config.presets import MODEL_PRESETS
from megadiff.config.schema import Config
from megadiff.data.batch import Batch
from megadiff.dist import process
from megadiff.dist.launcher import free_port
from megadiff.dist.traffic import count_traffic
from megadiff.engine.build import build_engine
from megadiff.engine.engine import Engine
from megadiff.planner.memory import stage_parameters
from megadiff.planner.traffic import SCALAR_ELEMENTS, step_traffic

PEER_NOTE = (
    "ours / other = samples a second of megadiff (DeepSpeed, ZeRO 0) / of a plain loop over diffusers' "
    "DiTTransformer2DModel, medians; the peer carries a time and label embedder in every block"
)
TRAFFIC_NOTE = "bytes between ranks: counted / closed form of one step, both without the scalar sums of loss and norm"
LAYOUTS: dict[str, dict[str, object]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 + sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}
Step = Callable[[Tensor, Tensor, int], None]


def main() -> None:
    """Runs both parts and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dit-small-cpu", choices=MODEL_PRESETS, help="preset of the network")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=25, help="turns that each side takes")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.batch_size, arguments.rounds, arguments.steps = "dit-tiny-test", 8, 2, 1
    torch.set_num_threads(1)
    config = run_config(arguments.model, arguments.batch_size)
    rows = [*speed_rows(config, arguments.rounds, arguments.steps), *traffic_rows()]
    print_rows(rows)
    if arguments.json is not None:
        write_json(rows, arguments.json)


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


def speed_rows(config: Config, rounds: int, steps: int) -> list[Row]:
    """Trains both sides in turns and compares the medians of their samples a second."""
    batch_size = config.train.global_batch_size
    engine = build_engine(config, resolve_layout(config, 1), process.start(timeout_seconds=600))
    sides = {"ours": our_step(engine), "peer": peer_step(config)}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    position = 0
    for turn in range(rounds + 2):
        images, labels = random_batch(config, turn)
        for name in list(sides) if turn % 2 else list(reversed(sides)):
            started, started_busy = time.perf_counter(), time.process_time()
            for _ in range(steps):
                sides[name](images, labels, position)
            if turn >= 2:  # the first turns warm up
                wall[name].append(steps * batch_size / (time.perf_counter() - started))
                busy[name].append(steps * batch_size / (time.process_time() - started_busy))
        position += batch_size
    process.stop()
    size = f"{config.model.preset}, batch {batch_size}, fp32"
    return [
        _speed_row(f"training ({size})", wall, must=1.0, aim=1.2, note=PEER_NOTE),
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


def peer_step(config: Config) -> Step:
    """One step of the plain loop with the same schedule, prediction, clipping and optimizer."""
    from diffusers import DiTTransformer2DModel

    from megadiff.diffusion.prediction import target
    from megadiff.diffusion.schedule import make_schedule

    model, settings = config.model, config.optimizer
    network = DiTTransformer2DModel(
        num_attention_heads=model.num_heads,
        attention_head_dim=model.hidden_size // model.num_heads,
        in_channels=model.in_channels,
        out_channels=model.in_channels,
        num_layers=model.num_layers,
        sample_size=model.input_size,
        patch_size=model.patch_size,
        num_embeds_ada_norm=model.num_classes,
    )
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0
    )
    schedule = make_schedule(config.diffusion.schedule, config.diffusion.num_train_timesteps)

    def step(images: Tensor, labels: Tensor, position: int) -> None:
        t = torch.randint(config.diffusion.num_train_timesteps, labels.shape)
        noise = torch.randn_like(images)
        alpha, sigma = schedule.at(t, images)
        output = network(alpha * images + sigma * noise, timestep=t, class_labels=labels).sample
        wanted = target(config.diffusion.prediction, images, noise, alpha, sigma)
        torch.nn.functional.mse_loss(output, wanted).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def traffic_rows() -> Iterator[Row]:
    """Bytes of one step on two processes: counted by ours, predicted as the other figure."""
    for name, settings in LAYOUTS.items():
        config = run_config("dit-tiny-test", 8, **settings)
        counted = sum(run_on_two(config))
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


def run_on_two(config: Config) -> list[int]:
    """The bytes that each of two processes hands to torch.distributed in its third step."""
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue[int] = context.SimpleQueue()
    port = free_port()
    ranks = [context.Process(target=count_bytes, args=(config, rank, port, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit("a process of the traffic count failed; its error is above")
    return [results.get() for _ in ranks]


def count_bytes(config: Config, rank: int, port: int, results: "SimpleQueue[int]") -> None:
    """What one of the two processes does."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    layout = resolve_layout(config, 2)
    engine = build_engine(config, layout, process.start(timeout_seconds=600))
    images, labels = random_batch(config, 0)
    size = layout.micro_batch_size
    micro_batches = [Batch(images[:size], labels[:size], torch.arange(size), None) for _ in range(layout.accumulation)]
    for _ in range(2):  # a pipeline sends shapes in its first step
        engine.train_step(micro_batches)
    with count_traffic(SCALAR_ELEMENTS) as traffic:
        engine.train_step(micro_batches)
    results.put(traffic.payload.total())
    process.stop()


if __name__ == "__main__":
    main()
