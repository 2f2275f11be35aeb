"""Classifier-free guidance (Ho and Salimans 2022) around a `predict` function."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.diffusion.condition import null_labels_like

# (x_t (B, C, H, W), t (B,) int64, conditions (B,) int64 or (B, F) float) -> (B, C or 2C, H, W)
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Guidance:
    """How answers with and without the condition are weighed: null + scale (conditional - null).

    The answer may be eps, x0, v or flow: at a given x_t they are affine in each other, so guidance acts alike on all.

    Attributes:
        scale: 1 is plain conditional sampling, 0 unconditional.
        num_classes: fixes the null label.
        interval: shares of time, 1 being noise, between which the scale acts (Kynkaanniemi et al. 2024); elsewhere the
            answer is the conditional one, in a call of half the size.
        rescale: share in which the guided answer gets the conditional one's standard deviation of each image (Lin et
            al. 2023, equations 15 and 16), against pictures that are too bright.
    """

    scale: float
    num_classes: int
    interval: tuple[float, float] = (0.0, 1.0)
    rescale: float = 0.0

    def acts(self, time: float) -> bool:
        """Whether the answer without the condition counts at a share of time."""
        low, high = self.interval
        return self.scale != 1.0 and low <= time <= high

    def weigh(self, both: Tensor, channels: int) -> Tensor:
        """The guided answer (B, C, H, W), rescaled, of both answers (2B, C or 2C, H, W)."""
        conditional, null = both[:, :channels].chunk(2)
        guided = torch.lerp(null, conditional, self.scale)
        if not self.rescale:
            return guided
        deviation, wanted = (answer.flatten(1).std(dim=1).view(-1, 1, 1, 1) for answer in (guided, conditional))
        ratio = torch.where(deviation > 0, wanted / deviation, 1.0)
        return guided * (1.0 - self.rescale + self.rescale * ratio)


def predict_both(predict: Predict, x_t: Tensor, t: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The network's answers with the condition and then without it, (2B, C or 2C, H, W), in one call of `predict`."""
    both_labels = torch.cat((labels, null_labels_like(labels, num_classes)))
    return predict(torch.cat((x_t, x_t)), torch.cat((t, t)), both_labels)
