"""Shows every class equally often by repeating the pictures of smaller classes."""

from torch import Tensor

from megadiff.data.dataset import Dataset, hash_parts
from megadiff.diffusion.condition import Condition
from megadiff.errors import DataError


def without_repeats(dataset: Dataset) -> Dataset:
    """The data set in which each picture counts once."""
    return dataset.pictures if isinstance(dataset, BalancedDataset) else dataset


class BalancedDataset:
    """A view of a data set in which each class has as many entries as the largest one.

    Entry i of a class with q pictures is its picture i modulo q, so an epoch shows each of them nearly equally often.

    Attributes:
        pictures: the data set itself.
    """

    def __init__(self, dataset: Dataset) -> None:
        """Plans the view.

        Raises:
            DataError: a class has no picture.
        """
        self.pictures = dataset
        members: list[list[int]] = [[] for _ in dataset.class_names]
        for index, label in enumerate(dataset.labels):
            members[label].append(index)
        empty = [name for name, own in zip(dataset.class_names, members, strict=True) if not own]
        if empty:
            raise DataError(f"data.balanced needs pictures of every class, and there are none of {', '.join(empty)}")
        longest = max(map(len, members))
        self._entries = [own[i % len(own)] for own in members for i in range(longest)]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of class k at position k."""
        return self.pictures.class_names

    @property
    def fingerprint(self) -> str:
        """A hash that changes with the content, its order or the classes."""
        return hash_parts(("balanced", self.pictures.fingerprint))

    @property
    def labels(self) -> list[int]:
        """The class of each entry."""
        labels = self.pictures.labels
        return [labels[index] for index in self._entries]

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def load(self, index: int) -> tuple[Tensor, Condition]:
        """Return the picture of an entry and its class."""
        return self.pictures.load(self._entries[index])
