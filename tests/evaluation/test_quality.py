"""All figures from tensors, and sets that cannot be judged."""

import pytest
import torch
from torch import Tensor

from megadiff.errors import ConfigError, DataError
from megadiff.evaluation.distances import frechet_distance, kernel_distance
from megadiff.evaluation.neighbours import compare_manifolds
from megadiff.evaluation.quality import judge


def gaussian(count: int, seed: int, dim: int = 4) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def test_a_judgement_holds_what_the_figures_say() -> None:
    real, fake = gaussian(40, 0), gaussian(30, 1) + 0.5
    found = judge(real, fake)
    assert found.frechet == frechet_distance(fake, real) and found.kernel == kernel_distance(fake, real)
    assert (found.precision, found.recall, found.density, found.coverage) == compare_manifolds(real, fake, 3, 5)
    assert (found.precision_neighbours, found.density_neighbours, found.inception_score) == (3, 5, None)
    assert judge(real, fake, gaussian(30, 2)).inception_score is not None


def test_one_number_of_neighbours_is_that_of_all() -> None:
    real, fake = gaussian(40, 0), gaussian(30, 1) + 0.5
    found = judge(real, fake, neighbours=2)
    assert (found.precision, found.recall, found.density, found.coverage) == compare_manifolds(real, fake, 2, 2)
    assert (found.precision_neighbours, found.density_neighbours) == (2, 2)


@pytest.mark.parametrize(
    ("real", "fake", "neighbours", "message"),
    [
        (gaussian(9, 0), gaussian(9, 1, dim=3), None, "real features have 4 dimensions and fake ones 3"),
        (gaussian(5, 0), gaussian(9, 1), None, "5 real pictures are too few for 5 neighbours each"),
        (gaussian(9, 0), gaussian(1, 1), 1, "1 fake pictures are too few for 1 neighbours each"),
        (gaussian(9, 0), gaussian(9, 1) / 0, None, "features of fake pictures are not finite"),
    ],
)
def test_what_cannot_be_judged_is_refused(real: Tensor, fake: Tensor, neighbours: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        judge(real, fake, neighbours=neighbours)


def test_no_neighbour_is_refused() -> None:
    with pytest.raises(ConfigError, match="neighbours = 0 is not positive"):
        judge(gaussian(9, 0), gaussian(9, 1), neighbours=0)
