"""The training loop: the same on every layout."""

import contextlib
import gc
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from megadiff.checkpoint.folders import find_checkpoint, has_checkpoint
from megadiff.checkpoint.reader import CheckpointReader
from megadiff.config.flags import LATEST
from megadiff.config.layout import resolve_layout
from megadiff.config.progressive import TrainingStage, stage_after, training_stages
from megadiff.config.schema import Config
from megadiff.config.warmup import with_warmup_steps
from megadiff.data import Batch, BatchLoader, Dataset, open_dataset
from megadiff.data.augment import Augmentation
from megadiff.data.balanced import without_repeats
from megadiff.data.order import check_enough_samples
from megadiff.dist.agree import on_first, together
from megadiff.dist.process import Process
from megadiff.engine.build import build_engine, kernels_line
from megadiff.engine.checkpointing import load_checkpoint, save_checkpoint
from megadiff.engine.engine import Engine
from megadiff.engine.generate import preview, preview_conditions
from megadiff.engine.monitor import Monitor, SilentMonitor
from megadiff.engine.quality import Evaluator, check_enough_pictures, open_run_space
from megadiff.engine.run_folder import RunFolder
from megadiff.errors import CheckpointError
from megadiff.evaluation.features import FeatureSpace
from megadiff.sampling.sampler import sampler_of


def train(config: Config, run_dir: Path, resume: str | None, process: Process) -> None:
    """Trains until `train.stop_at_step`, or else `train.steps`; a collective call.

    A run folder that has a checkpoint is continued from it.

    Args:
        config: the settings.
        run_dir: the run folder, which all ranks see.
        resume: a run folder or checkpoint to start from instead, or None.
        process: this process.

    Raises:
        MegadiffError: anything that the user can mend, on every rank.
    """
    for stage in training_stages(config):
        resolve_layout(stage.config, process.world_size)
    sampler_of(config)  # a text guard that is not there would stop the run at its first preview
    folder = RunFolder(run_dir)
    dataset = together(lambda: open_dataset(config))
    config = with_warmup_steps(config, len(dataset))
    stages = training_stages(config)
    check_enough_samples(len(dataset), max(stage.config.train.global_batch_size for stage in stages))
    check_enough_pictures(config, without_repeats(dataset))
    start = on_first(lambda: _starting_point(folder, resume))
    last_step = min(config.train.steps, config.train.stop_at_step or config.train.steps)
    steps = on_first(lambda: 0 if start is None else _steps_of(start))
    space = open_run_space(config, folder.features, process) if steps < last_step else None
    run = _Run(config, folder, dataset, [start] if start else [], last_step, process, space)
    if steps >= last_step:
        _train_stage(run, stage_after(config, steps), start)  # which finds nothing to do, and says so
    for stage in stages:
        if steps < min(stage.end_step, last_step):
            start = _train_stage(run, stage, start)
            steps = min(stage.end_step, last_step)
            gc.collect()  # an engine is full of cycles, which would keep two stages in memory


@dataclass(frozen=True)
class _Run:
    """What all stages of a run share.

    Attributes:
        config: of the whole run.
        dataset: at the run's full size; a stage of another size opens its own.
        protected: checkpoints that retention must not delete.
        last_step: where this start of the run ends.
        space: for quality figures, on rank 0 of a run that has some.
    """

    config: Config
    folder: RunFolder
    dataset: Dataset
    protected: list[Path]
    last_step: int
    process: Process
    space: FeatureSpace | None


def _train_stage(run: _Run, stage: TrainingStage, start: Path | None) -> Path | None:
    """Trains from a checkpoint (or from new weights) to the end of a stage; its last checkpoint, if it made one."""
    config, process = stage.config, run.process
    layout = resolve_layout(config, process.world_size)
    end = min(stage.end_step, run.last_step)
    is_full_size = config.model.input_size == run.config.model.input_size
    dataset = run.dataset if is_full_size else together(lambda: open_dataset(config))
    engine = build_engine(config, layout, process, run.config)
    differences = load_checkpoint(engine, start, run.dataset.fingerprint) if start else []
    evaluator = _open_evaluator(run, engine, dataset, end)
    on_first(lambda: run.folder.prepare(run.config, run.dataset.class_names, engine.steps))
    monitor = _open_monitor(engine, run.folder, run.last_step, process)
    _tell_start(monitor, engine, start, differences, run.last_step)
    if run.config.train.progressive:
        monitor.tell(f"stage {stage.number}: {config.model.input_size} pixels or latents a side, until step {end}")
    saved = None
    with (
        contextlib.closing(engine),
        contextlib.closing(monitor),
        contextlib.closing(_steps_of_data(engine, dataset)) as batches,
    ):
        while engine.steps < end:
            monitor.begin_step()
            result = engine.train_step(next(batches))
            monitor.end_step(engine.steps, result)
            if _is_due(engine.steps, config.monitor.sample_every_steps, end):
                per_row = config.monitor.samples_per_class
                images = preview(engine, preview_conditions(config, dataset), per_row)
                monitor.show_samples(engine.steps, images, per_row)
            if evaluator and _is_due(engine.steps, config.monitor.evaluate_every_steps, end):
                monitor.show_quality(engine.steps, evaluator.evaluate())
            if _is_due(engine.steps, config.checkpoint.save_every_steps, end):
                monitor.flush()
                saved = save_checkpoint(engine, run.folder.checkpoints, run.dataset.fingerprint, run.protected)
                monitor.tell(f"saved {saved}")
    return saved


def _steps_of(checkpoint: Path) -> int:
    with CheckpointReader(checkpoint) as reader:
        return reader.index.step


def _starting_point(folder: RunFolder, resume: str | None) -> Path | None:
    """The checkpoint to start from: the run folder's own before the one asked for, None for a fresh start."""
    if has_checkpoint(folder.path):
        return find_checkpoint(folder.path)
    if resume == LATEST:
        raise CheckpointError(f"--resume found no checkpoint in {folder.path}; leave it out or give it a path")
    return None if resume is None else find_checkpoint(Path(resume))


def _steps_of_data(engine: Engine, dataset: Dataset) -> Generator[list[Batch], None, None]:
    """Each step's micro-batches of this rank, without end; empty ones on pipeline stages that need no data."""
    config, layout = engine.config, engine.layout
    if not engine.needs_data:
        while True:
            yield []
    with BatchLoader(
        dataset,
        config.train.seed,
        layout.global_batch_size,
        layout.micro_batch_size,
        engine.grid.data.index,
        layout.data,
        config.data.prefetch_batches,
        engine.samples,
        Augmentation(config.data.flip, config.data.random_crop, config.data.hsv_jitter),
    ) as loader:
        yield from loader


def _open_evaluator(run: _Run, engine: Engine, dataset: Dataset, end: int) -> Evaluator | None:
    if engine.config.monitor.evaluate_every_steps == 0 or engine.steps >= end:
        return None
    return Evaluator(engine, without_repeats(dataset), run.space, run.folder.features)


def _open_monitor(engine: Engine, folder: RunFolder, last_step: int, process: Process) -> Monitor:
    if not process.is_first:
        return SilentMonitor()
    return Monitor(engine.config, folder, engine.steps, last_step, process.world_size, process.device)


def _is_due(step: int, every: int, last_step: int) -> bool:
    """True every so many steps and at the end; never if `every` is 0."""
    return every > 0 and (step % every == 0 or step == last_step)


def _tell_start(monitor: Monitor, engine: Engine, start: Path | None, differences: list[str], last_step: int) -> None:
    layout = engine.layout
    monitor.tell(
        f"layout: tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}, zero {layout.zero_stage}; "
        f"global batch {layout.global_batch_size} = micro {layout.micro_batch_size} x accumulation "
        f"{layout.accumulation} x data {layout.data}"
    )
    monitor.tell(kernels_line(engine.config, engine.device))
    if start is not None:
        monitor.tell(f"resumed from {start} at step {engine.steps}")
    for line in differences:
        monitor.tell(f"changed since that checkpoint: {line}")
    if engine.steps >= last_step:
        monitor.tell(f"nothing to do: step {engine.steps} of {last_step} is reached")
