"""Figures of nearest neighbours among features (N, D), in float64; distances come by rows, so that any set fits."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

PRECISION_NEIGHBOURS = 3  # as Kynkaanniemi et al. use
DENSITY_NEIGHBOURS = 5  # as Naeem et al. use
_ELEMENTS = 2**24  # of a block of distances: 128 MiB


class Nearest(NamedTuple):
    """The nearest members of a set for each of some features, nearest first.

    Attributes:
        distances: (M, k) float64.
        indices: (M, k) int64.
    """

    distances: Tensor
    indices: Tensor


class Manifolds(NamedTuple):
    """How two sets lie in each other's estimated manifold, the union of balls that reach to the k-th neighbour.

    Attributes:
        precision: the share of fakes in a real one's ball.
        recall: the share of real ones in a fake's ball; low where kinds of pictures are missing.
        density: how many real ones' balls a fake lies in, by k, on average; may exceed 1.
        coverage: the share of real ones with a fake in their ball.
    """

    precision: float
    recall: float
    density: float
    coverage: float


def compare_manifolds(
    real: Tensor,
    fake: Tensor,
    precision_neighbours: int = PRECISION_NEIGHBOURS,
    density_neighbours: int = DENSITY_NEIGHBOURS,
) -> Manifolds:
    """Precision and recall (Kynkaanniemi et al. 2019, eqs. 1, 2), density and coverage (Naeem et al. 2020, section 3).

    A ball's radius is the distance to the k-th nearest other member of the own set; its rim belongs to it.

    Args:
        real: (N, D), N above both k.
        fake: (M, D), M above the k of precision.
        precision_neighbours: k of precision and recall.
        density_neighbours: k of density and coverage.
    """
    real, fake = real.double(), fake.double()
    own = _smallest(real, real, max(precision_neighbours, density_neighbours), within=True).distances
    wide, dense = own[:, precision_neighbours - 1], own[:, density_neighbours - 1]
    fake_radii = _smallest(fake, fake, precision_neighbours, within=True).distances[:, -1]
    inside = balls = 0
    reached = covered = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    for rows, block in _blocks(fake, real):
        in_ball = block <= dense
        inside += int((block <= wide).any(1).sum())
        balls += int(in_ball.sum())
        covered = covered | in_ball.any(0)
        reached = reached | (block <= fake_radii[rows, None]).any(0)
    return Manifolds(
        precision=inside / len(fake),
        recall=float(reached.double().mean()),
        density=balls / (density_neighbours * len(fake)),
        coverage=float(covered.double().mean()),
    )


def nearest(features: Tensor, others: Tensor, k: int) -> Nearest:
    """The k members of `others` (N, D) that are nearest to each of `features` (M, D); k at most N."""
    found = _smallest(features.double(), others.double(), k, within=False)
    return Nearest(found.distances.sqrt(), found.indices)


def nearest_others(features: Tensor, k: int) -> Nearest:
    """The k other members of a set (N, D) that are nearest to each; k below N."""
    found = _smallest(features.double(), features.double(), k, within=True)
    return Nearest(found.distances.sqrt(), found.indices)


def _smallest(features: Tensor, others: Tensor, k: int, within: bool) -> Nearest:
    """Squared distances; `within` one set a member is not its own neighbour, but an equal one is."""
    parts = []
    for rows, block in _blocks(features, others):
        if within:
            block[torch.arange(len(rows), device=rows.device), rows] = torch.inf
        parts.append(block.topk(k, dim=1, largest=False))
    return Nearest(torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts]))


def _blocks(features: Tensor, others: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers of some rows, and their squared distances to all others."""
    lengths = others.square().sum(1)
    for rows in torch.arange(len(features), device=features.device).split(max(1, _ELEMENTS // len(others))):
        part = features[rows]
        squared = part.square().sum(1, keepdim=True) + lengths - 2 * (part @ others.T)
        yield rows, squared.clamp_(min=0)
