"""Bytes that a stage keeps of one micro-batch from its forward to its backward pass."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megadiff.config.layout import Layout
from megadiff.config.schema import Config
from megadiff.planner.meta_stage import run_stage, tensor_axis


def activation_bytes(config: Config, layout: Layout, layers: tuple[str, ...]) -> int:
    """What autograd saves in a stage, each storage once and without parameters, with the run's checkpointing.

    Args:
        config: network, precision, kernels and checkpointing.
        layout: micro-batch and tensor degree.
        layers: of the stage.
    """
    with count_saved() as saved:
        run_stage(config, layout, layers, tensor_axis(layout.tensor))
    return saved.total


class Saved:
    """Storages that autograd has saved, but those of parameters."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._kept: list[Tensor] = []  # a storage that is freed could lend its identity to another

    def note(self, tensor: Tensor) -> Tensor:
        """Counts a tensor's storage once."""
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            self._bytes[storage._cdata] = storage.nbytes()
            self._kept.append(tensor.detach())
        return tensor

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return sum(self._bytes.values())


@contextlib.contextmanager
def count_saved() -> Iterator[Saved]:
    """Counts what is saved for backward inside."""
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved
