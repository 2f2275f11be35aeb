"""How far two sets of pictures are apart, by their features in any fixed space; (N, D) and (M, D), in float64."""

import torch
from torch import Tensor


def frechet_distance(features: Tensor, others: Tensor) -> float:
    """Squared Frechet distance of the Gaussians with the means and covariances of two sets (Heusel et al. 2017, eq. 6).

    It falls with the number of samples at the same true distance: compare sets of one size only.

    Args:
        features: (N, D), N at least 2.
        others: (M, D), M at least 2.
    """
    first, second = features.double(), others.double()
    difference = first.mean(0) - second.mean(0)
    covariance, other_covariance = (torch.atleast_2d(torch.cov(part.T)) for part in (first, second))
    root = _square_root(covariance)
    # The trace of (C1 C2)^(1/2) by a symmetric matrix of the same eigenvalues.
    mixed = torch.linalg.eigvalsh(root @ other_covariance @ root).clamp(min=0).sqrt().sum()
    return float(difference.square().sum() + covariance.trace() + other_covariance.trace() - 2 * mixed)


def kernel_distance(features: Tensor, others: Tensor) -> float:
    """Squared maximum mean discrepancy with the kernel (x.y / D + 1)^3, unbiased (Binkowski et al. 2018, eq. 4).

    0 in the mean for two samples of one distribution, whatever their sizes; so it may be negative.

    Args:
        features: (N, D), N at least 2.
        others: (M, D), M at least 2.
    """
    first, second = features.double(), others.double()
    return _mean_of_pairs(first) + _mean_of_pairs(second) - 2 * float(_kernel(first, second).mean())


def _square_root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def _kernel(some: Tensor, others: Tensor) -> Tensor:
    return (some @ others.T / some.shape[1] + 1).pow(3)


def _mean_of_pairs(features: Tensor) -> float:
    """Over pairs of different members."""
    kernel, count = _kernel(features, features), len(features)
    return float((kernel.sum() - kernel.trace()) / (count * (count - 1)))
