"""All figures of two sets of features, whatever made them: also called by training, on any layout."""

from dataclasses import dataclass

from torch import Tensor

from megadiff.errors import ConfigError, DataError
from megadiff.evaluation.classes import inception_score
from megadiff.evaluation.distances import frechet_distance, kernel_distance
from megadiff.evaluation.neighbours import DENSITY_NEIGHBOURS, PRECISION_NEIGHBOURS, compare_manifolds


@dataclass(frozen=True)
class Quality:
    """How near fakes are to real pictures in one feature space.

    Attributes:
        frechet, kernel: distances, lower is better.
        precision, recall, density, coverage: see `Manifolds`, higher is better.
        inception_score: of the fakes, higher is better; None where the space has no classes.
        precision_neighbours: k of precision and recall.
        density_neighbours: k of density and coverage.
    """

    frechet: float
    kernel: float
    precision: float
    recall: float
    density: float
    coverage: float
    inception_score: float | None
    precision_neighbours: int
    density_neighbours: int


def judge(real: Tensor, fake: Tensor, logits: Tensor | None = None, neighbours: int | None = None) -> Quality:
    """Compares features of fakes with those of real pictures, in float64 on their device.

    The Frechet distance depends on the number of pictures: compare results of one number only.

    Args:
        real: (N, D) features.
        fake: (M, D) features in the same space.
        logits: (M, K) of the fakes, where the space has classes.
        neighbours: k of all four figures of neighbours; by default 3 for precision and recall, 5 for the others.

    Raises:
        ConfigError: k is not positive.
        DataError: fewer than two pictures, not more than k, or features that are not finite or of other dimensions.
    """
    for_precision, for_density = neighbours or PRECISION_NEIGHBOURS, neighbours or DENSITY_NEIGHBOURS
    if neighbours is not None and neighbours < 1:
        raise ConfigError(f"neighbours = {neighbours} is not positive; use 1 or more")
    _check(real, fake, max(for_precision, for_density))
    manifolds = compare_manifolds(real, fake, for_precision, for_density)
    return Quality(
        frechet=frechet_distance(fake, real),
        kernel=kernel_distance(fake, real),
        **manifolds._asdict(),
        inception_score=None if logits is None else inception_score(logits),
        precision_neighbours=for_precision,
        density_neighbours=for_density,
    )


def _check(real: Tensor, fake: Tensor, k: int) -> None:
    if real.shape[1] != fake.shape[1]:
        raise DataError(f"real features have {real.shape[1]} dimensions and fake ones {fake.shape[1]}; use one network")
    for name, features in (("real", real), ("fake", fake)):
        if len(features) <= max(k, 1):
            raise DataError(
                f"{len(features)} {name} pictures are too few for {k} neighbours each; give more or set neighbours = 1"
            )
        if not features.isfinite().all():
            raise DataError(f"features of {name} pictures are not finite; check the weights of the feature network")
