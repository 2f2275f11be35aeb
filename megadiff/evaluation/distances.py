"""How far two sets of pictures are apart, by their features in any fixed space; (N, D) and (M, D), in float64."""

import torch
from torch import Tensor

_ELEMENTS = 2**24  # of a block of kernel values: 128 MiB


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
    mixed = _kernel_sum(first, second) / (len(first) * len(second))
    return _mean_of_pairs(first) + _mean_of_pairs(second) - 2 * mixed


def _square_root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def _kernel(products: Tensor, dim: int) -> Tensor:
    return (products / dim + 1).pow(3)


def _kernel_sum(some: Tensor, others: Tensor) -> float:
    """Over all pairs, by rows, so that any set fits."""
    parts = some.split(max(1, _ELEMENTS // len(others)))
    return float(torch.stack([_kernel(part @ others.T, some.shape[1]).sum() for part in parts]).sum())


def _mean_of_pairs(features: Tensor) -> float:
    """Over pairs of different members."""
    count, dim = features.shape
    own = float(_kernel(features.square().sum(1), dim).sum())
    return (_kernel_sum(features, features) - own) / (count * (count - 1))
