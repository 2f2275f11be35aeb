"""Classifier-free guidance (Ho and Salimans 2022) around a `predict` function."""

from collections.abc import Callable

import torch
from torch import Tensor

from megadiff.diffusion.condition import null_labels_like

# (x_t (B, C, H, W), t (B,) int64, conditions (B,) int64 or (B, F) float) -> (B, C or 2C, H, W)
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


def predict_both(predict: Predict, x_t: Tensor, t: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The network's answers with the condition and then without it, (2B, C or 2C, H, W), in one call of `predict`.

    What the sampler makes of them is null + guidance (conditional - null), see `megadiff.ops.solver_step`. The answer
    may be eps, x0 or v: at a given x_t they are affine in each other, so guidance acts alike on all.
    """
    both_labels = torch.cat((labels, null_labels_like(labels, num_classes)))
    return predict(torch.cat((x_t, x_t)), torch.cat((t, t)), both_labels)
