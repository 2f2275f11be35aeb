"""What importance sampling of timesteps does to the variance of the loss, and what it costs a step.

A small DiT trains on the embedded pictures with the importance statistics on; a second one of the same settings without
them takes its steps in turns, which gives the ratio of step times. Then fresh noise on held-out pictures gives the
moments of the loss at every level, and with them the variance of one sample's loss estimate under a uniform draw and
under each density that the statistics of the run propose.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from pictures import Pictures, open_pictures, split
from report import Row, add_report_arguments, print_rows, write_json
from torch import Tensor

from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.diffusion.levels import DENSITIES
from megadiff.dist import process
from megadiff.dist.process import Process
from megadiff.engine.build import build_engine
from megadiff.engine.engine import Engine

# prediction -> must and aim of the ratio of variances, for the second-moment density.
LIMITS = {"eps": (2.0, 3.0), "v": (1.5, 2.0)}
STEP_LIMIT, STEP_AIM = 1.03, 1.01
WARMUP_STEPS = 5
EVALUATION_BATCH = 64


@dataclass(frozen=True)
class Moments:
    """Mean of the loss and of its square at each level, (L,) float64."""

    loss: Tensor
    squared: Tensor


def main() -> None:
    """Trains, measures and prints a table for each prediction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--preset", default="dit-small-cpu")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--draws", type=int, default=64, help="pictures a level in the measurement")
    parser.add_argument("--threads", type=int, default=2)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.preset, arguments.batch_size, arguments.steps, arguments.draws = "dit-tiny-test", 8, 20, 2
    torch.set_num_threads(arguments.threads)
    process_ = process.start(timeout_seconds=600)
    rows = [row for prediction in LIMITS for row in rows_of(prediction, arguments, process_)]
    process.stop()
    print_rows(rows)
    if arguments.json is not None:
        write_json(rows, arguments.json)


def rows_of(prediction: str, arguments: argparse.Namespace, process_: Process) -> list[Row]:
    """Step time and variances of one prediction."""
    config = run_config(prediction, arguments)
    training, held_out = split(open_pictures(config.model.input_size), 0)
    plain = config.model_copy(update={"diffusion": config.diffusion.model_copy(update={"importance": "none"})})
    engines = [build_engine(variant, resolve_layout(variant, 1), process_) for variant in (config, plain)]
    on, off = train_in_turns(engines, training)
    must, aim = LIMITS[prediction]
    moments = measure(engines[0], held_out, arguments.draws)
    rows = [
        Row(
            f"step with importance, {prediction}",
            1e3 * on,
            1e3 * off,
            "ms",
            on / off,
            STEP_LIMIT,
            STEP_AIM,
            lower_is_better=True,
            note="ours / other = median step with the statistics of losses and gradients / without any",
        )
    ]
    uniform = variance(moments, torch.ones_like(moments.loss))
    statistics_ = engines[0].objective.importance.statistics
    assert statistics_ is not None, "a run with importance"
    schedule = engines[0].objective.schedule
    for name, density_of in DENSITIES.items():
        per_timestep = density_of(statistics_, schedule)
        assert per_timestep is not None, "a refit has happened"
        drawn = variance(moments, per_timestep.view(len(moments.loss), -1).mean(1))
        is_asked_for = name == "loss"
        rows.append(
            Row(
                f"variance of the loss, {prediction}, density {name}",
                drawn,
                uniform,
                "",
                uniform / drawn,
                must if is_asked_for else None,
                aim if is_asked_for else None,
                note="ours / other = variance of one sample's estimate under the density / under a uniform draw",
            )
        )
    return rows


def run_config(prediction: str, arguments: argparse.Namespace) -> Config:
    """A class-conditional DiT whose statistics are refitted over the second half of the run."""
    steps = arguments.steps
    return load_config(
        None,
        {
            "model.preset": arguments.preset,
            "model.num_classes": 100,
            "diffusion.schedule": "linear",
            "diffusion.prediction": prediction,
            "diffusion.importance": "density",
            "diffusion.num_levels": 100,
            "diffusion.refit_from_step": steps // 2,
            "diffusion.refit_every_steps": max(1, steps // 10),
            "train.steps": steps,
            "train.global_batch_size": arguments.batch_size,
            "optimizer.lr": 1e-3,
            "optimizer.betas": (0.9, 0.99),
            "optimizer.warmup_steps": max(1, steps // 10),
        },
    )


def train_in_turns(engines: list[Engine], pictures: Pictures) -> list[float]:
    """Trains all engines, one step in turn; the median seconds of a step of each."""
    config = engines[0].config
    seconds: list[list[float]] = [[] for _ in engines]
    for step in range(config.train.steps):
        batch = pictures.batch(step, config.train.global_batch_size, config.train.seed)
        for index in (0, 1) if step % 2 else (1, 0):
            started = time.perf_counter()
            engines[index].train_step([batch])
            seconds[index].append(time.perf_counter() - started)
    return [statistics.median(values[WARMUP_STEPS:]) for values in seconds]


def measure(engine: Engine, pictures: Pictures, draws: int) -> Moments:
    """Moments of the loss at the middle of each level, over pictures and fresh noise."""
    objective, config = engine.objective, engine.config.diffusion
    width = config.num_train_timesteps // config.num_levels
    generator = torch.Generator().manual_seed(1)
    t = torch.arange(config.num_levels).repeat_interleave(draws) * width + width // 2
    chosen = pictures.take(torch.randint(len(pictures), (len(t),), generator=generator))
    noise = torch.randn(chosen.images.shape, generator=generator)
    losses = []
    for rows in torch.arange(len(t)).split(EVALUATION_BATCH):
        x0 = chosen.images[rows]
        alpha, sigma = objective.schedule.at(t[rows], x0)
        output = engine.predict(alpha * x0 + sigma * noise[rows], t[rows], chosen.labels[rows])
        wanted = noise[rows] if objective.prediction == "eps" else alpha * noise[rows] - sigma * x0
        losses.append((output - wanted).double().square().flatten(1).mean(1))
    table = torch.cat(losses).view(config.num_levels, draws)
    return Moments(table.mean(1), table.square().mean(1))


def variance(moments: Moments, density: Tensor) -> float:
    """Of the unbiased estimate loss / (T p) of one draw; `density` over levels need not be normalised."""
    relative = density / density.mean()
    return float((moments.squared / relative).mean() - moments.loss.mean().square())


if __name__ == "__main__":
    main()
