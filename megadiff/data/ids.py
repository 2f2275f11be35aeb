"""Pictures that say which sample they are: for tests of order, resume and layouts."""

import torch
from torch import Tensor

from megadiff.data.dataset import hash_parts
from megadiff.diffusion.condition import Condition


class IdDataset:
    """Sample k is filled with one value for k, spread over [-1, 1], and has class k % num_classes or a made-up text."""

    def __init__(
        self, num_samples: int, num_classes: int, in_channels: int, input_size: int, text_size: int = 0
    ) -> None:
        """Describe the pictures; nothing is stored.

        Args:
            num_samples: how many there are.
            num_classes: how many classes they have.
            in_channels: C.
            input_size: H and W.
            text_size: numbers of a text, which then stands in the place of a class.
        """
        self.num_samples, self.text_size = num_samples, text_size
        self.shape = (in_channels, input_size, input_size)
        self.class_names = tuple(str(label) for label in range(num_classes))
        self.fingerprint = hash_parts(
            ("ids", num_samples, num_classes, self.shape, *([text_size] if text_size else []))
        )

    @property
    def labels(self) -> list[int]:
        """The class of each picture; empty where they have texts."""
        if self.text_size:
            return []
        return [index % len(self.class_names) for index in range(self.num_samples)]

    def __len__(self) -> int:
        """Return the number of pictures."""
        return self.num_samples

    def load(self, index: int) -> tuple[Tensor, Condition]:
        """Return ((C, H, W) float32 filled with the value of `index`, its class or a text (F,) that depends on it)."""
        image = torch.full(self.shape, 2.0 * index / max(self.num_samples - 1, 1) - 1.0)
        if self.text_size:
            return image, torch.randn(self.text_size, generator=torch.Generator().manual_seed(index))
        return image, index % len(self.class_names)

    def decode(self, images: Tensor) -> Tensor:
        """Return the sample index (B,) int64 of each image (B, C, H, W); exact below 2**22 samples."""
        values = images[:, 0, 0, 0].double()
        return ((values + 1.0) * (max(self.num_samples - 1, 1) / 2.0)).round().long()
