"""Distances of two sets of features against closed forms."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import linalg
from torchmetrics.image.fid import FrechetInceptionDistance

from megadiff.evaluation import distances
from megadiff.evaluation.distances import frechet_distance, kernel_distance


def gaussian(count: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def whitened(features: torch.Tensor) -> torch.Tensor:
    """The same set with mean 0 and covariance 1 to the last digit."""
    centred = features - features.mean(0)
    return centred @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(centred.T))).T


def test_frechet_distance_is_the_closed_form_of_gaussians() -> None:
    base = whitened(gaussian(200, 5, 0))
    scale, shift = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.0], dtype=torch.float64), torch.arange(5.0).double()
    # Commuting covariances: |m|^2 + sum (s1 - s2)^2.
    expected = float(shift.square().sum() + (1 - scale).square().sum())
    assert frechet_distance(base, whitened(gaussian(300, 5, 1)) * scale + shift) == pytest.approx(expected, abs=1e-9)


def test_frechet_distance_of_covariances_that_do_not_commute() -> None:
    base, turn = whitened(gaussian(100, 2, 0)), torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    scale = torch.tensor([1.0, 3.0], dtype=torch.float64)
    first, second = base * scale, (base * scale) @ turn.T
    c1, c2 = torch.cov(first.T), torch.cov(second.T)
    # For 2 x 2: tr sqrt(P) = sqrt(tr P + 2 sqrt(det P)), and P = c1 c2.
    product = c1 @ c2
    trace = (product.trace() + 2 * product.det().sqrt()).sqrt()
    assert frechet_distance(first, second) == pytest.approx(float(c1.trace() + c2.trace() - 2 * trace), abs=1e-9)


@pytest.mark.parametrize("distance", [frechet_distance, kernel_distance])
def test_distances_are_symmetric_and_grow(distance: Callable[[torch.Tensor, torch.Tensor], float]) -> None:
    first, second = gaussian(60, 4, 0), gaussian(80, 4, 1)
    assert distance(first, second) == pytest.approx(distance(second, first), rel=1e-9)
    assert distance(first, second) < distance(first, second + 0.5) < distance(first, second + 1.0)


def test_frechet_distance_of_a_set_to_itself_is_nothing_even_with_fewer_members_than_features() -> None:
    few = gaussian(6, 20, 0, torch.float32)
    assert abs(frechet_distance(few, few)) < 1e-6


def test_kernel_distance_is_unbiased() -> None:
    values = torch.tensor(
        [kernel_distance(gaussian(20, 3, 2 * seed), gaussian(30, 3, 2 * seed + 1)) for seed in range(400)]
    )
    assert abs(float(values.mean())) < 3 * float(values.std()) / 20
    assert float(values.min()) < 0 < float(values.max())


def test_kernel_distance_against_a_sum_over_pairs() -> None:
    first, second = gaussian(4, 3, 0), gaussian(5, 3, 1)

    def kernel(x: torch.Tensor, y: torch.Tensor) -> float:
        return (float(x @ y) / 3 + 1) ** 3

    own = sum(kernel(first[i], first[j]) for i in range(4) for j in range(4) if i != j) / 12
    others = sum(kernel(second[i], second[j]) for i in range(5) for j in range(5) if i != j) / 20
    mixed = sum(kernel(x, y) for x in first for y in second) / 20
    assert kernel_distance(first, second) == pytest.approx(own + others - 2 * mixed, rel=1e-12)


def test_frechet_distance_is_that_of_the_usual_matrix_root() -> None:
    """scipy's root of the product of both covariances, as published FIDs are computed, and torchmetrics'."""
    first, second = gaussian(300, 24, 0) @ gaussian(24, 24, 2), gaussian(200, 24, 1) @ gaussian(24, 24, 3) + 0.5
    c1, c2 = np.cov(first.numpy(), rowvar=False), np.cov(second.numpy(), rowvar=False)
    shift = first.mean(0).numpy() - second.mean(0).numpy()
    expected = shift @ shift + np.trace(c1 + c2) - 2 * np.trace(linalg.sqrtm(c1 @ c2).real)
    found = frechet_distance(first, second)
    assert found == pytest.approx(float(expected), rel=1e-6)

    metric = FrechetInceptionDistance(feature=Identity(), normalize=True).set_dtype(torch.float64)
    metric.update(first, real=True)
    metric.update(second, real=False)
    assert found == pytest.approx(float(metric.compute()), rel=1e-6)


class Identity(torch.nn.Module):
    num_features = 24

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features


def test_kernel_distance_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = gaussian(50, 4, 0), gaussian(70, 4, 1) + 0.3
    whole = kernel_distance(first, second)
    monkeypatch.setattr(distances, "_ELEMENTS", 150)
    assert kernel_distance(first, second) == pytest.approx(whole, rel=1e-12)
