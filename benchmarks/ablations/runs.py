"""One run of a recipe through the real trainer, judged at its checkpoints."""

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from ablations.judge import Judge

from megadiff.checkpoint import CheckpointReader
from megadiff.config.schema import Config
from megadiff.dist import process
from megadiff.dist.process import Process
from megadiff.engine.inference import Network
from megadiff.engine.run_folder import RunFolder
from megadiff.engine.trainer import train


@dataclass(frozen=True)
class Point:
    """A judged checkpoint.

    Attributes:
        step, seconds: optimizer steps, and the time that they took (data included, judging not).
        loss: validation loss, the sum of both errors.
        noise: error of the noise alone, which the plain recipe trains.
        frechet, kernel: distances of samples, None where no samples were made.
    """

    step: int
    seconds: float
    loss: float
    noise: float
    frechet: float | None
    kernel: float | None


@dataclass(frozen=True)
class Curve:
    """A whole run; checkpoints of progressive stages below the full size are not judged and not among its points."""

    recipe: str
    seed: int
    points: tuple[Point, ...]

    @property
    def last(self) -> Point:
        return self.points[-1]


@dataclass(frozen=True)
class Task:
    """A run to do.

    Attributes:
        config: of the run; its checkpoints are the points of the curve.
        sample_every: samples are made at every so many-th checkpoint and at the last.
        folder: for the run; its weights are deleted after they were judged, its curve stays.
    """

    recipe: str
    config: Config
    sample_every: int
    folder: Path


_PROCESS: list[Process] = []
_JUDGES: list[Judge] = []


def begin(judge_file: Path) -> None:
    """Prepares a worker, in which runs follow each other."""
    torch.set_num_threads(1)
    _PROCESS.append(process.start(timeout_seconds=600))
    _JUDGES.append(torch.load(judge_file, weights_only=False))  # written by the parent of this process


def run(task: Task) -> Curve:
    """Trains and judges, unless the folder has the curve of the same settings from an earlier start."""
    file = task.folder / "curve.json"
    settings = task.config.model_dump(mode="json") | {"sample_every": task.sample_every}
    if file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["settings"] == settings:
            return Curve(task.recipe, task.config.train.seed, tuple(Point(**point) for point in stored["points"]))
    shutil.rmtree(task.folder, ignore_errors=True)
    task.folder.mkdir(parents=True)
    with (task.folder / "output.txt").open("w", encoding="utf-8") as output, contextlib.redirect_stdout(output):
        train(task.config, task.folder, None, _PROCESS[0])
    points = tuple(_judge(task, RunFolder(task.folder)))
    shutil.rmtree(RunFolder(task.folder).checkpoints)
    content = json.dumps({"settings": settings, "points": [asdict(point) for point in points]}, indent=1)
    partial = file.with_suffix(".partial")
    partial.write_text(content + "\n", encoding="utf-8")
    os.replace(partial, file)
    return Curve(task.recipe, task.config.train.seed, points)


def _judge(task: Task, folder: RunFolder) -> list[Point]:
    seconds = _seconds_of_steps(folder, task.config.train.global_batch_size)
    checkpoints = sorted(path for path in folder.checkpoints.iterdir() if path.is_dir() and not path.is_symlink())
    points = []
    for number, checkpoint in enumerate(checkpoints, start=1):
        with CheckpointReader(checkpoint) as reader:
            step, size = reader.index.step, reader.config().model.input_size
        if size != task.config.model.input_size:
            continue
        whole = task.config.model_copy(
            update={"train": task.config.train.model_copy(update={"progressive": False, "stages": ()})}
        )
        network = Network(whole, checkpoint, "ema", _PROCESS[0])
        has_samples = number % task.sample_every == 0 or number == len(checkpoints)
        frechet, kernel = _JUDGES[0].distances(network) if has_samples else (None, None)
        errors = _JUDGES[0].errors(network)
        points.append(Point(step, seconds[step - 1], errors.x0 + errors.noise, errors.noise, frechet, kernel))
    return points


def _seconds_of_steps(folder: RunFolder, batch_size: int) -> list[float]:
    """Time until the end of each step, from the log; all stages have batches of one size."""
    lines = [json.loads(line) for line in folder.log.read_text(encoding="utf-8").splitlines()]
    return list(itertools.accumulate(batch_size / line["samples_per_s"] for line in lines))


def reached(
    points: Sequence[Point], figure: Callable[[Point], float | None], goal: float, place: Callable[[Point], float]
) -> float:
    """Where a curve first is at or below a goal, on the line between two points; infinity if nowhere.

    A curve that starts below the goal counts as reaching it at its first point, where it may have been earlier.

    Args:
        points: in order.
        figure: what falls; points without it are passed over.
        goal: the value to reach.
        place: step or seconds of a point.
    """
    previous: tuple[float, float] | None = None
    for point in points:
        value = figure(point)
        if value is None:
            continue
        here = place(point)
        if value <= goal:
            if previous is None:
                return here
            before, higher = previous
            return before + (here - before) * (higher - goal) / (higher - value)
        previous = here, value
    return math.inf
