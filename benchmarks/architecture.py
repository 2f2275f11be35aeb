"""What the gated skip and the sub-pixel shift do to a small UNet: speed, size and quality at the same budget.

Four networks (joined skips, gated, shifted, both) train in turns in one process on the same batches of the embedded
pictures, one step each, so that a busy machine slows all of them. A tenth of the pictures is held out. Quality is that
of the averaged weights on them, with the same noise and timesteps for all. The table is printed whatever it says.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from pictures import Pictures, open_pictures, split
from report import add_report_arguments
from torch import Tensor

from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.diffusion.prediction import target, to_x0_and_noise
from megadiff.dist import process
from megadiff.engine.build import build_engine
from megadiff.engine.engine import Engine

VARIANTS: Mapping[str, dict[str, object]] = {
    "concat": {},
    "gated": {"skip": "gated"},
    "skip_shift": {"skip_shift": True},
    "gated + skip_shift": {"skip": "gated", "skip_shift": True},
}
PUBLISHED = (
    "published, against concat: +22 % throughput at equal quality (gated skip), +1.2 dB PSNR (shift); other networks, "
    "data and devices than here"
)
LEVELS = (0.1, 0.3, 0.5, 0.7)  # of all timesteps, where pictures are reconstructed
LOSS_LEVELS = 8  # timesteps of each picture in the validation loss
EVALUATION_BATCH = 64
WARMUP_TURNS = 3


@dataclass(frozen=True)
class Result:
    """What one variant reached.

    Attributes:
        name: of the variant.
        samples_per_second: median over the steps.
        parameters: their number.
        loss: mean squared error of the prediction on held-out pictures.
        psnr: dB of reconstructions in one step, by level of `LEVELS`; the mean over pictures.
    """

    name: str
    samples_per_second: float
    parameters: int
    loss: float
    psnr: tuple[float, ...]

    @property
    def mean_psnr(self) -> float:
        return statistics.mean(self.psnr)


def main() -> None:
    """Trains all variants and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=700, help="optimizer steps of each variant")
    parser.add_argument("--preset", default="unet-small-cpu")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.preset, arguments.batch_size, arguments.steps = "unet-tiny-test", 8, 12
    torch.set_num_threads(arguments.threads)
    process_ = process.start(timeout_seconds=600)
    config = run_config(arguments)
    training, held_out = split(open_pictures(config.model.input_size), arguments.seed)
    config = with_model(config, {"num_classes": int(training.labels.max()) + 1})
    engines = {}
    for name, options in VARIANTS.items():
        variant = with_model(config, options)
        engines[name] = build_engine(variant, resolve_layout(variant, 1), process_)
    rates = train_in_turns(engines, training, config)
    results = [evaluate(name, engine, rates[name], held_out) for name, engine in engines.items()]
    process.stop()
    print(f"{arguments.preset}, {arguments.steps} steps of {arguments.batch_size}, {len(held_out)} pictures held out")
    print_results(results)
    if arguments.json is not None:
        rows = [asdict(result) | {"mean_psnr": result.mean_psnr} for result in results]
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")


def run_config(arguments: argparse.Namespace) -> Config:
    """The budget that all variants share."""
    return load_config(
        None,
        {
            "model.preset": arguments.preset,
            "train.steps": arguments.steps,
            "train.global_batch_size": arguments.batch_size,
            "train.seed": arguments.seed,
            "optimizer.lr": 1e-3,
            "optimizer.betas": (0.9, 0.99),
            "optimizer.warmup_steps": max(1, arguments.steps // 10),
            "ema.decay": 0.99,
        },
    )


def with_model(config: Config, options: Mapping[str, object]) -> Config:
    """The config with some settings of the network replaced."""
    return config.model_copy(update={"model": config.model.model_copy(update=dict(options))})


def train_in_turns(engines: Mapping[str, Engine], pictures: Pictures, config: Config) -> dict[str, float]:
    """Trains every variant to the end, one step in turn; median samples a second of each."""
    batch_size, names = config.train.global_batch_size, list(engines)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(config.train.steps):
        batch = pictures.batch(turn, batch_size, config.train.seed)
        for offset in range(len(names)):  # each is first as often as the others
            name = names[(turn + offset) % len(names)]
            started = time.perf_counter()
            engines[name].train_step([batch])
            seconds[name].append(time.perf_counter() - started)
    return {name: batch_size / statistics.median(values[WARMUP_TURNS:]) for name, values in seconds.items()}


def evaluate(name: str, engine: Engine, samples_per_second: float, pictures: Pictures) -> Result:
    """Measures the averaged weights on held-out pictures."""
    timesteps = engine.config.diffusion.num_train_timesteps
    with engine.averaged_weights():
        losses = [
            value
            for level in range(LOSS_LEVELS)
            for value in measure(engine, pictures, int(timesteps * (level + 0.5) / LOSS_LEVELS), squared_error)
        ]
        levels = [int(timesteps * level) for level in LEVELS]
        psnr = tuple(statistics.mean(measure(engine, pictures, t, reconstruction_psnr)) for t in levels)
    count = sum(parameter.numel() for parameter in engine.chain.parameters())
    return Result(name, samples_per_second, count, statistics.mean(losses), psnr)


@dataclass(frozen=True)
class Answer:
    """A network's output at x_t = alpha x0 + sigma noise, all (B, C, H, W) but alpha and sigma (B, 1, 1, 1)."""

    prediction: str
    output: Tensor
    x0: Tensor
    noise: Tensor
    alpha: Tensor
    sigma: Tensor


def measure(engine: Engine, pictures: Pictures, timestep: int, figure: Callable[[Answer], Tensor]) -> Iterator[float]:
    """A figure of each picture at one timestep; the noise is a function of the timestep and the picture's number."""
    schedule, prediction = engine.objective.schedule, engine.objective.prediction
    noise = torch.randn(pictures.images.shape, generator=torch.Generator().manual_seed(timestep))
    for part in torch.arange(len(pictures)).split(EVALUATION_BATCH):
        x0, labels, t = pictures.images[part], pictures.labels[part], torch.full_like(part, timestep)
        alpha, sigma = schedule.at(t, x0)
        output = engine.predict(alpha * x0 + sigma * noise[part], t, labels)
        yield from figure(Answer(prediction, output, x0, noise[part], alpha, sigma)).tolist()


def squared_error(answer: Answer) -> Tensor:
    """Mean over pixels, (B,)."""
    wanted = target(answer.prediction, answer.x0, answer.noise, answer.alpha, answer.sigma)
    return (answer.output - wanted).square().mean((1, 2, 3))


def reconstruction_psnr(answer: Answer) -> Tensor:
    """Peak signal-to-noise ratio in dB of x0 as predicted in one step, (B,); pixels span 2."""
    x_t = answer.alpha * answer.x0 + answer.sigma * answer.noise
    x0, _ = to_x0_and_noise(answer.prediction, answer.output, x_t, answer.alpha, answer.sigma)
    return 10 * torch.log10(4 / (x0.clamp(-1, 1) - answer.x0).square().mean((1, 2, 3)))


def print_results(results: list[Result]) -> None:
    """Prints one line a variant, each figure followed by what it is against the first."""
    first = results[0]
    levels = [f"PSNR {level:g} T" for level in LEVELS]
    table = [["", "samples/s", "", "parameters", "", "loss", "", *levels, "mean PSNR, dB", ""]]
    for result in results:
        table.append(
            [
                result.name,
                f"{result.samples_per_second:.1f}",
                f"x {result.samples_per_second / first.samples_per_second:.3f}",
                f"{result.parameters:,}",
                f"x {result.parameters / first.parameters:.3f}",
                f"{result.loss:.5f}",
                f"x {result.loss / first.loss:.3f}",
                *(f"{value:.2f}" for value in result.psnr),
                f"{result.mean_psnr:.2f}",
                f"{result.mean_psnr - first.mean_psnr:+.2f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(PUBLISHED)


if __name__ == "__main__":
    main()
