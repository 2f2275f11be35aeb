"""The ablation: what its figures mean, in closed form; and that all of it runs."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ablations.judge import Effort, Judge, timesteps_of_levels
from ablations.recipes import PLAIN, Settings, combine
from ablations.runs import Curve, Point, reached
from ablations.tables import gain, gains_in_steps, loss_of, step_of, table
from pictures import Pictures
from torch import Tensor

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.diffusion.prediction import target
from megadiff.diffusion.schedule import make_schedule, schedule_of
from megadiff.evaluation.features import FeatureNet

ROOT = Path(__file__).resolve().parents[2]


def curve(name: str, *losses: float, seed: int = 0) -> Curve:
    points = (
        Point(10 * n, 2.0 * n, loss, loss / 2, loss if n == len(losses) else None, 0.1)
        for n, loss in enumerate(losses, 1)
    )
    return Curve(name, seed, tuple(points))


def test_a_goal_is_reached_between_two_points() -> None:
    points = curve("x", 8.0, 4.0, 2.0).points
    assert reached(points, loss_of, 3.0, step_of) == 25.0
    assert reached(points, loss_of, 4.0, step_of) == 20.0
    assert reached(points, loss_of, 9.0, step_of) == 10.0, "a curve that starts below counts its first point"
    assert reached(points, loss_of, 1.0, step_of) == math.inf
    assert reached(points, lambda point: point.frechet, 2.0, step_of) == 30.0


def test_gains_are_of_the_same_seed_and_medians() -> None:
    plain = [curve(PLAIN, 4.0, 2.0, 1.0), curve(PLAIN, 4.0, 3.0, 2.0, seed=1), curve(PLAIN, 4.0, 2.0, 1.0, seed=2)]
    fast = [curve("fast", 4.0, 1.0, 0.5), curve("fast", 4.0, 2.0, 1.0, seed=1), curve("fast", 4.0, 2.0, 1.5, seed=2)]
    assert gain(fast, plain, loss_of, step_of) == [1.5, 1.5, 0.0]
    assert gains_in_steps({PLAIN: plain, "fast": fast}) == {"fast": 1.5}
    printed = table({PLAIN: plain, "fast": fast}).splitlines()
    assert len(printed) == 4 and printed[3].startswith("| fast | 1.50x (0.00 to 1.50) |")


def test_what_helps_is_put_together_by_trial() -> None:
    rows = {
        "cosine": {"schedule": "cosine"},
        "flow": {"schedule": "flow", "prediction": "flow"},
        "v": {"prediction": "v"},
        "lion": {"name": "lion"},
        "adaptive": {"sampling": "adaptive"},
        "gated": {"skip": "gated"},
        "final": {"final_fraction": 0.1},
    }
    gains = {"cosine": 1.2, "flow": 1.5, "v": 3.0, "lion": 1.01, "adaptive": 1.1, "gated": 1.3, "final": 1.06}
    trials = []

    def measure(names: list[str], settings: Settings) -> float:
        trials.append((names, dict(settings)))
        return {"gated": 2.0, "cosine": 4.0, "final": 4.5}[names[-1]]

    names = combine(rows, gains, lambda settings: "sampling" not in settings, measure)
    assert names == ["v", "cosine", "final"], "flow wants another prediction, lion is within the noise"
    assert [tried for tried, _ in trials] == [["v", "gated"], ["v", "cosine"], ["v", "cosine", "final"]]
    assert trials[-1][1] == {"prediction": "v", "schedule": "cosine", "final_fraction": 0.1}


def test_nothing_is_put_together_where_nothing_helps() -> None:
    def measure(names: list[str], settings: Settings) -> float:
        raise AssertionError("no trial is needed")

    assert combine({"lion": {"name": "lion"}}, {"lion": 1.01}, lambda settings: True, measure) == []
    assert combine({"lion": {"name": "lion"}}, {"lion": 1.5}, lambda settings: True, measure) == ["lion"]


@pytest.mark.parametrize("name", ["linear", "cosine", "hybrid", "flow"])
def test_levels_are_the_same_noise_on_every_schedule(name: str) -> None:
    schedule = make_schedule(name, 1000)
    timesteps = timesteps_of_levels(schedule)
    assert timesteps == sorted(set(timesteps))
    angles = torch.atan2(schedule.sigma, schedule.alpha)[timesteps] * 180 / math.pi
    torch.testing.assert_close(angles, 4.5 + 9.0 * torch.arange(10.0).double(), rtol=0, atol=0.5)


class Oracle:
    """A network that knows the pictures and is off by a known error of x0."""

    def __init__(self, config: Config, judge: Judge, error: float) -> None:
        self.config, self.judge, self.error = config, judge, error

    def predict(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        alpha, sigma = schedule_of(self.config).at(t, x_t)
        x0 = self.judge.pictures.images + self.error
        return target(self.config.diffusion.prediction, x0, (x_t - alpha * x0) / sigma, alpha, sigma)


@pytest.mark.parametrize(
    ("schedule", "prediction"), [("linear", "eps"), ("cosine", "v"), ("hybrid", "x0"), ("flow", "flow")]
)
def test_errors_do_not_depend_on_what_a_network_predicts(schedule: str, prediction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = Pictures(torch.rand(6, 3, 8, 8, generator=generator) * 2 - 1, torch.arange(6) % 3)
    judge = Judge(FeatureNet(3, 3, 8).eval().requires_grad_(False), pictures, Effort(6, 4, 6))
    config = load_config(
        None,
        {"diffusion.schedule": schedule, "diffusion.prediction": prediction},
    )
    exact = judge.errors(Oracle(config, judge, 0.0))
    assert exact.x0 < 1e-6 and exact.noise < 1e-6
    off = judge.errors(Oracle(config, judge, 0.1))
    levels = schedule_of(config)
    snr = (levels.snr[timesteps_of_levels(levels)]).mean()
    assert off.x0 == pytest.approx(0.01, rel=1e-3)
    assert off.noise == pytest.approx(0.01 * float(snr), rel=1e-2), "noise is off by alpha / sigma times as much"


def test_pictures_that_are_missing_are_told(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/ablation.py", "--data", "fashion_mnist", "--data-path", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith(f"{tmp_path} does not hold")


@pytest.mark.slow
def test_recipes_are_compared_and_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/ablation.py", "--quick", "--steps", "12", "--jobs", "1"]
    command += ["--work-dir", str(tmp_path), "--recipes", "v", "progressive"]
    printed = []
    for _ in range(2):
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, result.stderr
        printed.append([line for line in result.stdout.splitlines() if line.startswith("|")])
        written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("curve.json")}
        if len(printed) == 1:
            first = written
    assert printed[0] == printed[1] and written == first and len(first) == 3
    assert [line.split("|")[1].strip() for line in printed[0][2:]][:3] == ["plain", "v", "progressive"]
    assert (tmp_path / "emoji_quick" / "curves.png").stat().st_size > 10_000
    assert not list(tmp_path.rglob("*.safetensors")), "weights are deleted after they were judged"
