"""One micro-batch of samples."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """What one data rank trains on in one micro-batch.

    Attributes:
        images: (B, C, H, W) float32, pixels in [-1, 1] or stored latents.
        labels: conditions, (B,) int64 classes or (B, F) float32 texts, see `megadiff.diffusion.condition`.
        sample_ids: (B,) int64 position of each sample in the global stream, unique over a training run.
        mask: (B, 1, H, W) float32 weight of each pixel in the loss, or None for all ones.
        indices: (B,) int64 data set index of each sample, for reports and tests.
    """

    images: Tensor
    labels: Tensor
    sample_ids: Tensor
    mask: Tensor | None = None
    indices: Tensor | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """Return this batch with every tensor on `device`."""
        return Batch(
            images=self.images.to(device),
            labels=self.labels.to(device),
            sample_ids=self.sample_ids.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            indices=None if self.indices is None else self.indices.to(device),
        )
