"""The training objective: noisy inputs for the network and weighted sums of squared errors for its output.

It knows neither the network nor how the batch is cut: everything random depends on (seed, step, sample id), and losses
are sums, so that the caller divides by the number of elements of the global batch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megadiff.config.schema import DiffusionConfig
from megadiff.diffusion.condition import drop_condition
from megadiff.diffusion.importance import Importance
from megadiff.diffusion.levels import Observation
from megadiff.diffusion.perceptual import PerceptualLoss
from megadiff.diffusion.prediction import require_invertible, target_weights
from megadiff.diffusion.schedule import NoiseSchedule
from megadiff.diffusion.weighting import loss_weights
from megadiff.ops.diffuse import diffuse
from megadiff.ops.library import Kernels
from megadiff.ops.philox import Purpose
from megadiff.ops.weighted_mse import weighted_mse


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """One micro-batch for the network and its loss; floats are float32, or float64 if the images are.

    Attributes:
        x_t: (B, C, H, W) noisy images.
        t: (B,) int64 in [0, T).
        labels: (B,) int64; the null label where the condition was dropped.
        target: (B, C, H, W) what the network should answer.
        weight: (B,) loss weight of each sample.
        pictures: what a perceptual loss needs, None without one: x0 (B, C, H, W), x_t, and (B, 3) coefficients.
    """

    x_t: Tensor
    t: Tensor
    labels: Tensor
    target: Tensor
    weight: Tensor
    pictures: tuple[Tensor, Tensor, Tensor] | None = None


class DiffusionObjective:
    """Prepares inputs and measures outputs for one schedule, prediction and weighting.

    Attributes:
        importance: which timesteps are drawn how often, and the factor on their losses.
    """

    def __init__(
        self,
        schedule: NoiseSchedule,
        diffusion_config: DiffusionConfig,
        num_classes: int,
        seed: int,
        kernels: Kernels = "auto",
        importance: Importance | None = None,
        perceptual: PerceptualLoss | None = None,
    ) -> None:
        """Refuses impossible settings at once.

        Raises:
            ConfigError: the prediction or the weighting is not finite at a timestep of the schedule.
        """
        require_invertible(diffusion_config.prediction, schedule)
        self.schedule = schedule
        self.prediction = diffusion_config.prediction
        self.condition_dropout = diffusion_config.condition_dropout
        self.num_classes = num_classes
        self.seed = seed
        self.kernels: Kernels = kernels
        self.perceptual = perceptual
        self.importance = importance or Importance(diffusion_config, schedule)
        self.loss_weights = loss_weights(
            diffusion_config.loss_weight, diffusion_config.prediction, schedule, diffusion_config.min_snr_gamma
        )
        self.refresh_weights()

    def prepare(self, images: Tensor, labels: Tensor, sample_ids: Tensor, step: int) -> TrainingInputs:
        """Draw timesteps, noise and dropped conditions for a micro-batch.

        Args:
            images: (B, C, H, W) clean images or latents.
            labels: (B,) int64 in [0, num_classes).
            sample_ids: (B,) int64, unique over the run.
            step: the optimizer step.
        """
        self._move_tables(images.device)
        x0 = images.to(_loss_dtype(images))
        t = self.importance.sampler.draw(self.seed, step, sample_ids)
        alpha, sigma = (value.flatten() for value in self.schedule.at(t, x0))
        coefficients = torch.stack((alpha, sigma, *target_weights(self.prediction, alpha, sigma)), dim=1)
        x_t, target = diffuse(x0, coefficients, self.seed, step, sample_ids, Purpose.NOISE, kernels=self.kernels)
        return TrainingInputs(
            x_t=x_t,
            t=t,
            labels=drop_condition(labels, self.num_classes, self.condition_dropout, self.seed, step, sample_ids),
            target=target,
            weight=self.weights[t].to(x0.dtype),
            pictures=None if self.perceptual is None else (x0, x_t, self._coefficients(self.perceptual, t)),
        )

    def _coefficients(self, perceptual: PerceptualLoss, t: Tensor) -> Tensor:
        """Rows of the perceptual loss's table, whose last column takes the factor of importance."""
        rows = perceptual.table[t]
        return torch.cat((rows[:, :2], rows[:, 2:] * self.factors[t, None]), dim=1)

    def losses(
        self,
        output: Tensor,
        target: Tensor,
        weight: Tensor,
        mask: Tensor | None = None,
        pictures: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return each sample's weighted sum of squared errors, (B,) float32 (float64 if an input is float64).

        With a perceptual loss, (1 - its weight) of that plus the perceptual loss times the elements of a sample: the
        mean over elements is then (1 - w) of the mean squared error plus w of the mean difference of features.

        Args:
            output: (B, C, H, W), or (B, 2C, H, W) of a learn_sigma network, whose sigma half is not trained.
            target: (B, C, H, W).
            weight: (B,).
            mask: (B, 1, H, W); elements where it is 0 are left out, whatever they hold.
            pictures: of the TrainingInputs.
        """
        squared = weighted_mse(output, target, weight, mask, kernels=self.kernels)
        if self.perceptual is None or pictures is None:
            return squared
        if mask is not None:
            raise ValueError("a perceptual loss compares whole pictures, but some of their elements are masked")
        features = self.perceptual.per_sample(output, *pictures) * target[0].numel()
        return (1.0 - self.perceptual.weight) * squared + features.to(squared.dtype)

    def num_elements(self, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return how many elements losses counts, a scalar int64 on the device of `target`."""
        if mask is None:
            return torch.tensor(target.numel(), device=target.device)
        return torch.count_nonzero(mask.expand(len(target), 1, *target.shape[2:])) * target.shape[1]

    def after_step(self, step: int, t: Tensor, loss: Tensor, squared_gradient: Tensor) -> Observation:
        """Learns from a step which timesteps matter.

        Args:
            step: optimizer steps so far, this one included.
            t, loss, squared_gradient: (G,) of the whole global batch, equal on every rank: timesteps, mean
                losses as trained, and their squared gradient norms (0 if not measured).

        Returns:
            What was seen, without the factors of importance.
        """
        self._move_tables(loss.device)
        factors = self.factors[t]
        seen = Observation(t, loss / factors, squared_gradient / factors.square())
        if self.importance.after_step(step, seen):
            self.refresh_weights()
        return seen

    def refresh_weights(self) -> None:
        """Takes over the factors of importance after they have changed."""
        self.factors = self.importance.factors.to(self.loss_weights.device)
        self.weights = self.loss_weights * self.factors

    def _move_tables(self, device: torch.device) -> None:
        if self.weights.device != device:
            self.schedule = self.schedule.to(device)
            self.loss_weights = self.loss_weights.to(device)
            if self.perceptual is not None:
                self.perceptual = replace(self.perceptual, table=self.perceptual.table.to(device))
            self.refresh_weights()


def _loss_dtype(images: Tensor) -> torch.dtype:
    return torch.float64 if images.dtype == torch.float64 else torch.float32
