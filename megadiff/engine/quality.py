"""How near a network in training comes to its data: figures of pictures from the averaged weights, on any layout.

All ranks make the pictures; only rank 0 has the feature network, which costs little beside the sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megadiff.config.schema import Config
from megadiff.data import Dataset
from megadiff.diffusion.condition import Condition
from megadiff.dist.agree import on_first, together
from megadiff.dist.process import Process
from megadiff.engine.engine import Engine
from megadiff.engine.generate import averaged_images
from megadiff.errors import DataError
from megadiff.evaluation.extract import Work, compute, extract
from megadiff.evaluation.features import Features, FeatureSpace
from megadiff.evaluation.images import choose_rows, open_training
from megadiff.evaluation.quality import Quality, judge
from megadiff.evaluation.spaces import SettingNames, open_space
from megadiff.sampling.images import to_uint8

_BATCH = 64  # pictures at once, in the sampler of each data rank and in the feature network
_THREADS = 4  # that decode real pictures
_SETTINGS = SettingNames("monitor.evaluate_features", "monitor.evaluate_weights")


@dataclass(frozen=True)
class QualityReport:
    """What was found at a step, equal on every rank.

    Attributes:
        quality: the figures.
        features: name of the feature space.
        fingerprint: of the feature space.
        num_images: of each set.
        size: pixels a side.
    """

    quality: Quality
    features: str
    fingerprint: str
    num_images: int
    size: int


def check_enough_pictures(config: Config, dataset: Dataset) -> None:
    """Refuses to compare with more pictures than there are.

    Args:
        dataset: without repeats.

    Raises:
        DataError: names both numbers.
    """
    count, total = config.monitor.evaluate_images, len(dataset)
    if config.monitor.evaluate_every_steps and count > total:
        raise DataError(
            f"monitor.evaluate_images = {count} exceeds the {total} pictures of data.name = {config.data.name}; use at "
            f"most {total}, or evaluate_every_steps = 0"
        )


def open_run_space(config: Config, cache: Path, process: Process) -> FeatureSpace | None:
    """The feature space of a run: on rank 0 where the run is judged, else None; a collective call.

    Args:
        cache: where the embedded classifier is kept.

    Raises:
        MegadiffError: it cannot be opened, on every rank.
    """
    settings = config.monitor
    if settings.evaluate_every_steps == 0:
        return None
    weights = None if settings.evaluate_weights is None else Path(settings.evaluate_weights)

    def opened() -> FeatureSpace | None:
        if not process.is_first:
            return None
        # New layers draw their weights, though a file replaces them: training must not notice.
        with torch.random.fork_rng([process.device] if process.device.type == "cuda" else []):
            return open_space(settings.evaluate_features, weights, cache, _SETTINGS)

    return together(opened)


class Evaluator:
    """Compares the pictures of an engine with fixed real ones; every call makes the same pictures of new weights.

    Attributes:
        conditions: class or text of each picture: those of the real pictures, so that proportions are the data's.
    """

    def __init__(self, engine: Engine, dataset: Dataset, space: FeatureSpace | None, cache: Path) -> None:
        """Chooses the real pictures and computes their features, or reads them; a collective call.

        Args:
            engine: to be judged.
            dataset: at the engine's size, without repeats.
            space: of `open_run_space`.
            cache: folder for features.

        Raises:
            MegadiffError: a picture cannot be read, or the cache is damaged or cannot be written; on every rank.
        """
        count, self.engine, self.space = engine.config.monitor.evaluate_images, engine, space
        title = f"{engine.config.data.name} of {cache.parent}"
        self.conditions = picture_conditions(engine.config, dataset, choose_rows(len(dataset), count, title))
        work = Work(_BATCH, engine.device, _THREADS)

        def real_features() -> Features | None:
            return None if space is None else extract(open_training(title, dataset, count), space, work, cache)

        self._real = together(real_features)

    def evaluate(self) -> QualityReport:
        """The figures of the averaged weights as they are now, in float64; a collective call."""
        at_once = _BATCH * self.engine.grid.data.degree
        parts = (
            pixels
            for images in averaged_images(self.engine, self.conditions, at_once)
            for pixels in to_uint8(images).expand(-1, 3, -1, -1).split(_BATCH)
        )
        if self.space is not None:
            fake = compute(parts, self.space, self.engine.device)
        else:
            for _ in parts:  # sampled together with rank 0, and left to it
                pass
        return on_first(lambda: self._compare(fake))

    def _compare(self, fake: Features) -> QualityReport:
        space, real, model = self.space, self._real, self.engine.config.model
        assert space is not None and real is not None, "only rank 0 compares"
        quality = judge(real.values.to(self.engine.device), fake.values.to(self.engine.device))
        return QualityReport(quality, space.name, space.fingerprint, len(fake.values), model.input_size)


def picture_conditions(config: Config, dataset: Dataset, rows: Sequence[int]) -> list[Condition]:
    """What the pictures of some rows show, as the network reads it."""
    if config.model.condition == "none":
        return [0] * len(rows)
    if config.model.condition == "text":
        return [dataset.load(row)[1] for row in rows]
    labels = dataset.labels
    return [labels[row] for row in rows]
