"""Classifier-free guidance (Ho and Salimans 2022) around a `predict` function."""

from collections.abc import Callable

import torch
from torch import Tensor

from megadiff.diffusion.condition import null_labels_like

# (x_t (B, C, H, W), t (B,) int64, labels (B,) int64) -> (B, C or 2C, H, W)
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


def guided(predict: Predict, num_classes: int, guidance: float) -> Predict:
    """Return a predict function whose answer is null + guidance (conditional - null).

    It calls `predict` once, on the doubled batch [conditional; null]. With guidance 1 it is `predict` itself.
    The answer may be eps, x0 or v: at a given x_t they are affine in each other, so it acts alike on all.
    """
    if guidance == 1.0:
        return predict

    def predict_guided(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        both_labels = torch.cat((labels, null_labels_like(labels, num_classes)))
        output = predict(torch.cat((x_t, x_t)), torch.cat((t, t)), both_labels)
        conditional, null = output.to(x_t.dtype).chunk(2)
        return torch.lerp(null, conditional, guidance)

    return predict_guided
