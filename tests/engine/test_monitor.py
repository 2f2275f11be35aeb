"""What is shown of a run: the log line of every step, TensorBoard, the plain line, the picture grid."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megadiff.config.schema import Config
from megadiff.diffusion.levels import Observation
from megadiff.dist import devices
from megadiff.engine import monitor as monitor_module
from megadiff.engine.engine import StepResult
from megadiff.engine.generate import preview
from megadiff.engine.monitor import Monitor
from megadiff.engine.quality import QualityReport
from megadiff.engine.run_folder import RunFolder
from megadiff.evaluation.quality import Quality
from megadiff.sampling.guidance import Predict
from tests.engine.runs import RUN_SECONDS, log_lines, run, tiny_config, train_well
from tests.parity.jobs import ready_engine
from tests.parity.networks import parity_config
from tests.pool import WorkerPool

CPU = torch.device("cpu")
FIELDS = {"step", "loss", "grad_norm", "lr", "samples_per_s", "mfu", "memory_bytes", "applied"}


def result(step: int) -> StepResult:
    """A step whose numbers say which step it is; its two samples lie in the first and the last tenth."""
    seen = Observation(torch.tensor([0, 999]), torch.tensor([step, 10.0 * step]).double(), torch.zeros(2).double())
    return StepResult(torch.tensor(1.0 / step), torch.tensor(float(step)), 1e-3 * step, step != 2, seen)


def watched(tmp_path: Path, steps: int, first: int = 0, **settings: object) -> RunFolder:
    """A run folder after some steps."""
    folder = RunFolder(tmp_path)
    monitor = Monitor(tiny_config(monitor__tensorboard=True, **settings), folder, first, steps, 1, CPU)
    for step in range(first + 1, steps + 1):
        monitor.begin_step()
        monitor.end_step(step, result(step))
    monitor.close()
    return folder


def board(folder: RunFolder) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder.tensorboard))
    accumulator.Reload()
    return accumulator


def test_the_log_has_every_step_with_its_own_values(tmp_path: Path) -> None:
    watched(tmp_path, 7, monitor__log_every_steps=3)
    lines = log_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    for line in lines:
        step = line["step"]
        assert line.keys() == FIELDS
        expected = [torch.tensor(1.0 / step).item(), float(step), 1e-3 * step]
        assert [line["loss"], line["grad_norm"], line["lr"]] == expected
        assert line["applied"] == (step != 2)
        assert line["samples_per_s"] > 0 and line["memory_bytes"] > 0 and line["mfu"] is None


def test_the_log_is_there_while_the_run_goes_on(tmp_path: Path) -> None:
    """Up to the last log step; a crash loses fewer than `log_every_steps` lines."""
    monitor = Monitor(tiny_config(monitor__log_every_steps=2), RunFolder(tmp_path), 0, 9, 1, CPU)
    counts = []
    for step in range(1, 6):
        monitor.begin_step()
        monitor.end_step(step, result(step))
        counts.append(len(log_lines(tmp_path)))
    monitor.close()
    assert counts == [0, 2, 2, 4, 4]


def test_values_leave_the_device_at_log_steps_only(tmp_path: Path) -> None:
    monitor = Monitor(tiny_config(monitor__log_every_steps=3), RunFolder(tmp_path), 0, 9, 1, CPU)
    with mock.patch.object(torch.Tensor, "__float__", side_effect=AssertionError("a sync")):
        for step in (1, 2):
            monitor.begin_step()
            monitor.end_step(step, result(step))
        with pytest.raises(AssertionError, match="a sync"):
            monitor.end_step(3, result(3))
    monitor.close()


def test_tensorboard_has_the_same_values(tmp_path: Path) -> None:
    folder = watched(tmp_path, 5)
    events = board(folder)
    for key, tag in [("loss", "Loss/train"), ("grad_norm", "GradNorm/global"), ("lr", "LearningRate")]:
        found = {event.step: event.value for event in events.Scalars(tag)}
        assert found.keys() == {1, 2, 3, 4, 5}
        for line in log_lines(tmp_path):
            assert math.isclose(found[line["step"]], line[key], rel_tol=1e-6)
    assert "Throughput/mfu" not in events.Tags()["scalars"], "a CPU has no peak"


def test_tensorboard_has_the_loss_of_each_noise_level(tmp_path: Path) -> None:
    """Means over the samples since the last log step, only where there were any."""
    events = board(watched(tmp_path, 6, monitor__log_every_steps=3))
    found = {tenth: [(e.step, e.value) for e in events.Scalars(f"LossByNoise/{tenth}")] for tenth in (0, 9)}
    assert found == {0: [(3, 2.0), (6, 5.0)], 9: [(3, 20.0), (6, 50.0)]}
    assert "LossByNoise/5" not in events.Tags()["scalars"]


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    watched(tmp_path, 8)
    events = board(watched(tmp_path, 10, first=5))
    assert [event.step for event in events.Scalars("Loss/train")] == list(range(1, 11))


def test_a_device_with_a_known_peak_has_a_utilisation(tmp_path: Path) -> None:
    with mock.patch.object(monitor_module, "peak_flops", lambda *_: 1e12):
        watched(tmp_path, 2, monitor__log_every_steps=1)
    for line in log_lines(tmp_path):
        flops = monitor_module.training_flops(tiny_config().model)
        assert line["mfu"] == pytest.approx(devices.model_flops_utilisation(line["samples_per_s"], flops, 1, 1e12))
        assert line["mfu"] > 0


def test_without_a_terminal_there_is_a_plain_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched(tmp_path, 5, monitor__log_every_steps=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["2/5", "4/5", "5/5"]
    pattern = r"step 4/5  loss 0\.2500  grad_norm 4\.000  lr 4\.00e-03  [\d.]+ images/s  mfu n/a  left \d+:\d\d:\d\d"
    assert re.fullmatch(pattern, lines[1]), lines[1]


def test_on_a_terminal_there_is_a_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("sys.stderr.isatty", return_value=True):
        watched(tmp_path, 4, monitor__log_every_steps=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "4/4" in captured.err and "loss=0.25" in captured.err


def test_samples_become_a_picture_and_an_image_in_tensorboard(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    monitor = Monitor(tiny_config(monitor__tensorboard=True), folder, 0, 9, 1, CPU)
    images = torch.linspace(-1, 1, 4 * 3 * 16).reshape(4, 3, 4, 4)
    path = monitor.show_samples(7, images, per_row=2)
    monitor.close()
    assert path == tmp_path / "samples" / "step_00000007.png"
    (event,) = board(folder).Images("Generated")
    with Image.open(path) as picture:
        assert event.step == 7
        assert (event.width, event.height) == picture.size and picture.size[0] == picture.size[1]


def test_latents_are_not_shown(tmp_path: Path) -> None:
    monitor = Monitor(tiny_config(), RunFolder(tmp_path), 0, 9, 1, CPU)
    assert monitor.show_samples(1, torch.zeros(2, 4, 4, 4), per_row=1) is None
    monitor.close()
    assert not (tmp_path / "samples").exists()


def test_figures_become_a_line_in_the_file_on_the_screen_and_in_tensorboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    monitor = Monitor(tiny_config(monitor__tensorboard=True), folder, 0, 9, 1, CPU)
    found = {"frechet": 12.5, "kernel": -0.25, "precision": 0.75, "recall": 0.5, "density": 1.25, "coverage": 0.875}
    quality = Quality(**found, inception_score=None, precision_neighbours=3, density_neighbours=5)
    for step in (3, 6):
        monitor.show_quality(step, QualityReport(quality, "quarters", "abc", num_images=8, size=4))
    monitor.close()
    about = {"num_images": 8, "size": 4, "features": "quarters", "fingerprint": "abc"}
    lines = [json.loads(line) for line in folder.quality.read_text().splitlines()]
    assert lines == [{"step": step, **found, **about} for step in (3, 6)]
    shown = "frechet 12.5  kernel -0.25  precision 0.75  recall 0.5  density 1.25  coverage 0.875"
    assert f"quality at step 6: {shown}  (8 pictures, quarters)\n" in capsys.readouterr().out
    for name, value in found.items():
        assert [(event.step, event.value) for event in board(folder).Scalars(f"Quality/{name}")] == [
            (3, value),
            (6, value),
        ]


def test_a_real_run_logs_what_its_steps_returned(pools: Mapping[int, WorkerPool], tmp_path: Path) -> None:
    config = tiny_config(
        train__steps=9, monitor__tensorboard=True, monitor__sample_every_steps=4, monitor__log_every_steps=2
    )
    report = train_well(pools[1], config, tmp_path)
    logged = [(line["loss"], line["grad_norm"], line["lr"]) for line in log_lines(tmp_path)]
    assert logged == report.results
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        f"step_{step:08d}.png" for step in (4, 8, 9)
    ]
    assert [event.step for event in board(RunFolder(tmp_path)).Images("Generated")] == [4, 8, 9]
    names = json.loads((tmp_path / "classes.json").read_text())
    assert names == ["0", "1", "2", "3", "4"]


@dataclass(frozen=True)
class GridReport:
    """What one rank saw while it made a grid."""

    used_average: bool
    equals_average: bool
    is_restored: bool
    images: torch.Tensor
    raw_images: torch.Tensor


def make_grids(config: Config) -> GridReport:
    """The job for the pool: a grid of an engine whose average differs from its weights."""
    engine = ready_engine(config)
    for name, values in engine.ema.values.items():
        values.mul_(0.5 + 0.01 * len(name))
    before = _parameters(engine.chain)
    seen: list[list[torch.Tensor]] = []

    def opened() -> Predict:
        predict = open_predict()

        def watching(*inputs: torch.Tensor) -> torch.Tensor:
            seen.append(_parameters(engine.chain))
            return predict(*inputs)

        return watching

    open_predict = engine.open_predict
    with mock.patch.object(engine, "open_predict", opened):
        images = preview(engine, range(engine.config.model.num_classes), 2)
    after = _parameters(engine.chain)
    with mock.patch.object(engine, "ema", None):
        raw_images = preview(engine, range(engine.config.model.num_classes), 2)
    average = [engine.ema.values[shard.name].view(shard.size) for shard in engine.shards.all if shard.numel]
    return GridReport(
        used_average=all(not _equal(parameters, before) for parameters in seen) and bool(seen),
        equals_average=all(_equal(parameters, average) for parameters in seen),
        is_restored=_equal(after, before),
        images=images,
        raw_images=raw_images,
    )


def _parameters(chain: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in chain.parameters()]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("layout", [(1, {}), (2, {}), (2, {"tensor": 2})], ids=["1", "dp2", "tp2"])
def test_the_grid_comes_from_the_average_and_the_weights_come_back(
    pools: Mapping[int, WorkerPool], layout: tuple[int, dict[str, int]]
) -> None:
    world_size, settings = layout
    config = parity_config(**settings)
    config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"steps": 2})})
    reports = pools[world_size].run(make_grids, RUN_SECONDS, config=config)
    for report in reports:
        assert report.used_average and report.equals_average and report.is_restored
        assert report.images.shape == (20, 3, 8, 8) and report.images.isfinite().all()
        assert not torch.allclose(report.images, report.raw_images, atol=1e-3)
        assert torch.equal(report.images, reports[0].images)


def test_a_text_guard_that_is_not_there_is_refused_before_a_step(
    pools: Mapping[int, WorkerPool], tmp_path: Path
) -> None:
    guard = {"sampling__dynamic_steps": "spectrum", "sampling__text_guard": "nowhere:f"}
    report = run(pools[2], tiny_config(monitor__sample_every_steps=2, **guard), tmp_path / "run")
    assert report.error.startswith("ConfigError: sampling.text_guard = nowhere:f is not there")
    assert not (tmp_path / "run").exists()
