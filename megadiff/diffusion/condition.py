"""The condition of a sample, and the one definition of "no condition", shared by objective, sampler and networks.

A condition is an int64 class label, or a float vector (F,): the text tokens (L, E) row by row, then the pooled vector.
A batch of them is (B,) int64 or (B, F) float. Without a condition a label is the extra last class and a text is zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megadiff.ops import philox
from megadiff.ops.philox import Purpose

Condition = int | Tensor


def null_label(num_classes: int) -> int:
    """Return the label that stands for no condition: the extra last row of the label embedding."""
    return num_classes


def null_labels_like(labels: Tensor, num_classes: int) -> Tensor:
    """Return labels or texts without a condition, in the shape of `labels`."""
    return torch.zeros_like(labels) if labels.is_floating_point() else torch.full_like(labels, null_label(num_classes))


def stack_conditions(conditions: Sequence[Condition]) -> Tensor:
    """One batch, (B,) int64 or (B, F), from single conditions that are all of one kind."""
    if isinstance(conditions[0], Tensor):
        return torch.stack([torch.as_tensor(condition) for condition in conditions])
    return torch.tensor(conditions)


def drop_condition(
    labels: Tensor, num_classes: int, probability: float, seed: int, step: int, sample_ids: Tensor
) -> Tensor:
    """Take the condition of a sample in `labels` (B, ...) away with `probability`, by (seed, step, sample id)."""
    draws = philox.uniform(seed, step, sample_ids, Purpose.CONDITION, dtype=torch.float64)
    dropped = (draws < probability).view(-1, *[1] * (labels.dim() - 1))
    return torch.where(dropped, null_labels_like(labels, num_classes), labels)
