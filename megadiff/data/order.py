"""Which sample comes when: a function of (seed, position), so a run resumes from one integer."""

import torch
from torch import Tensor

from megadiff.errors import DataError
from megadiff.ops.philox import permutation


class SampleOrder:
    """The endless stream of data set indices: sample k is entry k % N of the permutation of epoch k // N.

    Epochs follow each other without a gap, so nothing is dropped or padded and the batch size plays no part.
    """

    def __init__(self, seed: int, num_samples: int) -> None:
        """Prepare the stream of a data set with `num_samples` >= 1 samples."""
        if num_samples < 1:
            raise DataError(f"the data set has {num_samples} samples; it needs at least 1")
        self.seed = seed
        self.num_samples = num_samples
        self._permutations: dict[int, Tensor] = {}

    def indices(self, positions: Tensor) -> Tensor:
        """Return the data set index (B,) int64 of each stream position (B,) int64 >= 0."""
        epochs = positions // self.num_samples
        entries = positions % self.num_samples
        indices = torch.empty_like(positions)
        for epoch in epochs.unique().tolist():
            chosen = epochs == epoch
            indices[chosen] = self._permutation(epoch)[entries[chosen]]
        return indices

    def _permutation(self, epoch: int) -> Tensor:
        """Return the (N,) order of an epoch; the two latest are kept because a batch may straddle two."""
        if epoch not in self._permutations:
            while len(self._permutations) > 1:
                self._permutations.pop(next(iter(self._permutations)))
            self._permutations[epoch] = permutation(self.seed, epoch, self.num_samples)
        return self._permutations[epoch]


def stream_index(position: int, seed: int, num_samples: int) -> int:
    """Return the data set index at one position of the stream (see `SampleOrder`, which caches)."""
    return int(SampleOrder(seed, num_samples).indices(torch.tensor([position]))[0])


def check_enough_samples(num_samples: int, global_batch_size: int) -> None:
    """Refuse a data set that is smaller than one global batch: a step would see a picture twice.

    Raises:
        DataError: names both numbers.
    """
    if num_samples < global_batch_size:
        raise DataError(
            f"the data set has {num_samples} samples, fewer than train.global_batch_size = "
            f"{global_batch_size}; lower train.global_batch_size or add samples"
        )
