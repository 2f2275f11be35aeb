"""The one definition of "no condition", shared by the objective and by guidance in the sampler."""

import torch
from torch import Tensor

from megadiff.ops import philox
from megadiff.ops.philox import Purpose


def null_label(num_classes: int) -> int:
    """Return the label that stands for no condition: the extra last row of the label embedding."""
    return num_classes


def null_labels_like(labels: Tensor, num_classes: int) -> Tensor:
    """Return labels without a condition, in the shape of `labels`."""
    return torch.full_like(labels, null_label(num_classes))


def drop_condition(
    labels: Tensor, num_classes: int, probability: float, seed: int, step: int, sample_ids: Tensor
) -> Tensor:
    """Replace `labels` (B,) by the null label with `probability`, decided by (seed, step, sample id)."""
    draws = philox.uniform(seed, step, sample_ids, Purpose.CONDITION, dtype=torch.float64)
    return torch.where(draws < probability, null_labels_like(labels, num_classes), labels)
