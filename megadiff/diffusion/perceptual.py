"""Losses on features of the predicted clean picture, beside the squared error of the prediction (A11, A12)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.config.schema import DiffusionConfig
from megadiff.diffusion.prediction import x0_weights
from megadiff.diffusion.schedule import NoiseSchedule

# Pictures or latents (B, C, H, W) to features (B, F, h, w).
Features = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PerceptualLoss:
    """Compares features of the predicted and the true x0 where the picture can be seen through the noise.

    Attributes:
        features: a frozen network; it is called in float32, or float64 where the pictures are.
        weight: of the mean absolute difference of features; the squared error has 1 - weight.
        gram_weight: of the mean squared difference of their Gram matrices, which tells textures.
        table: (T, 3) float64: p and q of x0 = p x_t + q output, and 1 where snr is above the bound, else 0.
    """

    features: Features
    weight: float
    gram_weight: float
    table: Tensor

    def per_sample(self, output: Tensor, x0: Tensor, x_t: Tensor, coefficients: Tensor) -> Tensor:
        """The loss of each sample, (B,), as a mean over features.

        Args:
            output: (B, C or more, H, W) the network's answer.
            x0, x_t: (B, C, H, W).
            coefficients: (B, 3) rows of the table; the last column may hold a factor.
        """
        of_x_t, of_output, factor = coefficients.to(x0.dtype).view(-1, 3, 1, 1, 1).unbind(1)
        predicted = of_x_t * x_t + of_output * output[:, : x0.shape[1]].to(x0.dtype)
        # Where nothing counts the prediction may be huge: there the true picture stands in for it.
        predicted = torch.where(factor > 0, predicted, x0)
        found = self.features(predicted)
        with torch.no_grad():
            true = self.features(x0)
        loss = self.weight * (found - true).abs().flatten(1).mean(1)
        if self.gram_weight > 0:
            loss = loss + self.gram_weight * (gram(found) - gram(true)).square().flatten(1).mean(1)
        return loss * factor.flatten()


def gram(features: Tensor) -> Tensor:
    """Products of channels, averaged over positions and channels: (B, F, h, w) -> (B, F, F) (Gatys et al. 2016)."""
    flat = features.flatten(2)
    return flat @ flat.mT / (flat.shape[1] * flat.shape[2])


def make_perceptual(config: DiffusionConfig, schedule: NoiseSchedule, features: Features) -> PerceptualLoss:
    """The loss that a config describes, for features of pictures."""
    seen = (schedule.snr > config.perceptual_min_snr).to(torch.float64)
    weights = x0_weights(config.prediction, schedule.alpha, schedule.sigma)
    table = torch.stack((*weights, seen), dim=1)
    return PerceptualLoss(features, config.perceptual_weight, config.gram_weight, table)
