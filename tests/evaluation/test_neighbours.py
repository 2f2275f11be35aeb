"""Precision, recall, density and coverage against a second method over all pairs, and in closed cases."""

import math

import pytest
import torch
from torch import Tensor

from megadiff.evaluation import neighbours
from megadiff.evaluation.neighbours import Manifolds, compare_manifolds, nearest, nearest_others


def gaussian(count: int, dim: int, seed: int) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def line(*places: float) -> Tensor:
    return torch.tensor(places, dtype=torch.float64)[:, None]


def radius(points: list[list[float]], index: int, k: int) -> float:
    return sorted(math.dist(points[index], other) for number, other in enumerate(points) if number != index)[k - 1]


def over_all_pairs(real: Tensor, fake: Tensor, k: int, k_density: int) -> Manifolds:
    """The definitions, word by word."""
    reals, fakes = real.tolist(), fake.tolist()
    radii = [radius(reals, index, k) for index in range(len(reals))]
    fake_radii = [radius(fakes, index, k) for index in range(len(fakes))]
    dense = [radius(reals, index, k_density) for index in range(len(reals))]
    inside = [any(math.dist(x, y) <= r for x, r in zip(reals, radii, strict=True)) for y in fakes]
    reached = [any(math.dist(x, y) <= r for y, r in zip(fakes, fake_radii, strict=True)) for x in reals]
    balls = sum(math.dist(x, y) <= r for x, r in zip(reals, dense, strict=True) for y in fakes)
    covered = [any(math.dist(x, y) <= r for y in fakes) for x, r in zip(reals, dense, strict=True)]
    shares = (sum(inside) / len(fakes), sum(reached) / len(reals))
    return Manifolds(*shares, balls / (k_density * len(fakes)), sum(covered) / len(reals))


@pytest.mark.parametrize("block", [2**24, 100])
@pytest.mark.parametrize(("k", "k_density"), [(3, 5), (1, 1), (4, 2)])
def test_all_four_are_the_definitions_over_all_pairs(
    monkeypatch: pytest.MonkeyPatch, block: int, k: int, k_density: int
) -> None:
    """Also where distances come in blocks."""
    monkeypatch.setattr(neighbours, "_ELEMENTS", block)
    for seed in range(4):
        real, fake = gaussian(40, 2, 2 * seed), gaussian(30, 2, 2 * seed + 1) * 0.7 + 0.4
        found = compare_manifolds(real, fake, k, k_density)
        assert found == pytest.approx(over_all_pairs(real, fake, k, k_density), rel=1e-12)
        assert found.precision > 0 and 0 < found.recall < 1 and 0 < found.coverage < 1


def test_equal_sets_fill_each_other() -> None:
    """A fake lies on its real twin and on the rim of those whose k-th neighbour it is."""
    points = gaussian(50, 3, 0).float()
    found = compare_manifolds(points, points.clone(), 3, 3)
    assert (found.precision, found.recall, found.coverage) == (1.0, 1.0, 1.0)
    assert found.density == pytest.approx(1.0, abs=0.35)


def test_sets_far_apart_share_nothing() -> None:
    real = gaussian(30, 3, 0)
    assert compare_manifolds(real, gaussian(30, 3, 1) + 100) == Manifolds(0.0, 0.0, 0.0, 0.0)


def test_a_closed_case_on_a_line() -> None:
    """Balls of the real ones reach 1, 1, 1 and 7 far; of the fakes 1, 1 and 9."""
    real, fake = line(0, 1, 2, 9), line(1, 2, 11)
    # Of the fakes 1 is in three balls (on the rim of two), 2 in three (of 1, 2 and 9), 11 in one.
    expected = Manifolds(precision=1.0, recall=1.0, density=7 / 3, coverage=1.0)
    assert compare_manifolds(real, fake, 1, 1) == pytest.approx(expected)
    # Without the far fake only the first three real ones are reached, and the last one's ball has 2 on its rim.
    assert compare_manifolds(real, line(1, 2), 1, 1) == pytest.approx(Manifolds(1.0, 0.75, 3.0, 1.0))
    assert compare_manifolds(real, line(1, 1), 1, 1) == pytest.approx(Manifolds(1.0, 0.25, 3.0, 0.75))


def test_recall_and_coverage_fall_when_samples_collapse() -> None:
    """Precision cannot tell: every sample looks real."""
    real, good = gaussian(400, 4, 0), gaussian(400, 4, 1)
    recalls, coverages = [], []
    for kinds in (400, 40, 4):
        collapsed = good[:kinds].repeat(400 // kinds, 1) + 1e-3 * gaussian(400, 4, 2)
        found = compare_manifolds(real, collapsed)
        assert found.precision > 0.7
        recalls.append(found.recall)
        coverages.append(found.coverage)
    assert recalls[0] > 0.7 and recalls[1] < 0.05 and recalls[2] == 0.0
    assert coverages[0] > 0.9 > 0.5 > coverages[1] > coverages[2]


def test_the_nearest_are_sorted_and_a_member_is_not_its_own_neighbour() -> None:
    points = line(0, 1, 3, 3)
    found = nearest(line(2.5), points, 3)
    assert found.distances[0].tolist() == pytest.approx([0.5, 0.5, 1.5])
    assert set(found.indices[0, :2].tolist()) == {2, 3} and int(found.indices[0, 2]) == 1
    own = nearest_others(points, 1)
    assert own.distances[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0], "an equal one is a neighbour"
    assert own.indices[2:, 0].tolist() == [3, 2]
