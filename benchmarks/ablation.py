"""What each training method buys: one small network, one budget, several seeds; a row a method.

Every run goes through the real trainer and is judged at its checkpoints, on pictures that no run sees: by its
errors at fixed noise levels (see ablations/judge.py) and by the Frechet and kernel distance of its samples in the
features of a small classifier. "Steps fewer" is the plain recipe's number of steps by the steps until its final
value is reached. The last row puts together what helped, by trial: the best row, then each next one that makes the
whole faster. Runs that were finished are not repeated if the benchmark is started again with the same settings. The
table is printed whatever it says.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from ablations.judge import Effort, Judge
from ablations.recipes import ALL_THAT_HELPED, PLAIN, PLAIN_SETTINGS, Settings, combine, recipes
from ablations.runs import Curve, Task, begin, run
from ablations.subjects import SUBJECTS, Subject
from ablations.tables import draw, gains_in_steps, table
from fashion_mnist import FOLDER
from tqdm import tqdm

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.errors import ConfigError, MegadiffError
from megadiff.evaluation.features import train_features

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = (
    "Published for other networks and data, not measured here: cosine 1.4 times fewer steps; v 1.6 times fewer, and "
    "15 % better FID on CIFAR-10; min-SNR 3.4 times fewer."
)


@dataclass(frozen=True)
class Budget:
    """How long each run is, and how much is measured."""

    steps: int
    batch_size: int
    num_points: int
    sample_every: int
    seeds: int
    feature_steps: int
    effort: Effort


FULL = Budget(720, 32, 8, 2, 3, 1500, Effort(pictures=128, samples=256, real=4096))
QUICK = Budget(60, 16, 4, 4, 1, 60, Effort(pictures=32, samples=64, real=128))


def main() -> None:
    """Runs everything that is asked for, and prints one table."""
    arguments = _parser().parse_args()
    data = arguments.data or ("emoji" if arguments.quick else "fashion_mnist")
    given = {name: value for name in ("steps", "seeds") if (value := getattr(arguments, name)) is not None}
    budget = replace(QUICK if arguments.quick else FULL, **given)
    work_dir = arguments.work_dir / (f"{data}_quick" if arguments.quick else data)
    try:
        subject = SUBJECTS[data](arguments.data_path, work_dir)
    except MegadiffError as error:
        sys.exit(str(error))
    work_dir.mkdir(parents=True, exist_ok=True)
    rows = recipes(subject.stages)
    chosen = list(rows) if arguments.recipes is None else list(dict.fromkeys([PLAIN, *arguments.recipes]))
    if unknown := [name for name in chosen if name not in rows]:
        sys.exit(f"--recipes {unknown[0]} is unknown; use some of {', '.join(rows)}")
    experiment = Experiment(subject, budget, work_dir, arguments.jobs)
    curves = experiment.curves({name: rows[name] for name in chosen})

    def measure(names: list[str], settings: Settings) -> float:
        trial = " + ".join(names)
        curves.update(experiment.curves({trial: settings}))
        return gains_in_steps(curves)[trial]

    names = combine(rows, gains_in_steps(curves), experiment.is_allowed, measure)
    if names:
        curves[ALL_THAT_HELPED] = curves.pop(" + ".join(names)) if len(names) > 1 else curves[names[0]]
    title = (
        f"{data}, {budget.steps} steps of {budget.batch_size}, {budget.seeds} seed{'s' * (budget.seeds > 1)}; "
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print(f"{title}\n\n{table(curves)}\n")
    print(f"All that helped: {', '.join(names) or 'nothing'}. Rows of several names are trials on the way.")
    print(PUBLISHED)
    draw(curves, title, arguments.picture or work_dir / "curves.png")
    print(f"curves        {arguments.picture or work_dir / 'curves.png'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=SUBJECTS, help="default: fashion_mnist, with --quick the embedded emoji")
    parser.add_argument("--data-path", type=Path, default=FOLDER, help=f"files of Fashion-MNIST (default {FOLDER})")
    parser.add_argument("--quick", action="store_true", help="short runs of one seed, to see that all of it works")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of a run (default {FULL.steps})")
    parser.add_argument("--seeds", type=int, help=f"runs of each recipe (default {FULL.seeds})")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="rows beside the plain one (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, each on one core")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "ablation", help="for runs and results")
    parser.add_argument("--picture", type=Path, help="file for the curves (default: in the working folder)")
    return parser


@dataclass(frozen=True)
class Experiment:
    """All runs on one subject with one budget."""

    subject: Subject
    budget: Budget
    work_dir: Path
    jobs: int

    def curves(self, rows: dict[str, Settings]) -> dict[str, Sequence[Curve]]:
        """Trains and judges every recipe with every seed, some at a time."""
        os.environ["OMP_NUM_THREADS"] = "1"  # of the workers, which share the cores
        tasks = list(self._tasks(rows))
        found: dict[str, list[Curve]] = {name: [] for name in rows}
        judge_file = self._write_judge()
        with ProcessPoolExecutor(self.jobs, get_context("spawn"), begin, (judge_file,)) as pool:
            for curve in tqdm(pool.map(run, tasks), total=len(tasks), unit="run", disable=not sys.stderr.isatty()):
                found[curve.recipe].append(curve)
                print(f"{curve.recipe}, seed {curve.seed}: loss {curve.last.loss:.5f}", file=sys.stderr, flush=True)
        return dict(found)

    def is_allowed(self, settings: Settings) -> bool:
        """Whether a run may have these settings together."""
        try:
            self._config(settings, 0)
        except ConfigError:
            return False
        return True

    def _tasks(self, rows: dict[str, Settings]) -> Iterator[Task]:
        for seed in range(self.budget.seeds):
            for name, settings in rows.items():
                folder = self.work_dir / f"{name.replace(' ', '_').replace('%', 'percent')}_{seed}"
                yield Task(name, self._config(settings, seed), self.budget.sample_every, folder)

    def _config(self, settings: Settings, seed: int) -> Config:
        steps = self.budget.steps
        budget: dict[str, Any] = {
            "train.steps": steps,
            "train.global_batch_size": self.budget.batch_size,
            "train.seed": seed,
            "optimizer.warmup_steps": max(1, steps // 20),
            "checkpoint.save_every_steps": max(1, steps // self.budget.num_points),
            "checkpoint.keep_last": 0,
            "sampling.steps": 15,
            "monitor.sample_every_steps": 0,
            "monitor.tensorboard": False,
        }
        return load_config(None, {**PLAIN_SETTINGS, **self.subject.settings, **budget, **settings})

    def _write_judge(self) -> Path:
        """The judge with its feature network, as all workers load it."""
        classes = int(self.subject.settings["model.num_classes"])
        training = self.subject.training
        features = train_features(training.images, training.labels, classes, self.budget.feature_steps)
        file = self.work_dir / "judge.pt"
        torch.save(Judge(features, self.subject.held_out, self.budget.effort), file)
        return file


if __name__ == "__main__":
    main()
