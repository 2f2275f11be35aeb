"""Bytes that a stage keeps of one micro-batch from its forward to its backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadiff.config.layout import Layout
from megadiff.config.schema import Config
from megadiff.parallel.stage import stage_layers, stages_of_rank
from megadiff.planner.meta_stage import entering_state, meta_stages, tensor_axis


def activation_bytes(config: Config, layout: Layout) -> list[int]:
    """What is alive after the forward pass of a micro-batch in each stage, in the order of the stages.

    Read off a forward pass on the meta device, with the run's checkpointing: inputs, what autograd saves, skips that
    wait for their taker, and the output. Parameters don't count.

    Args:
        config: network, layout, precision, kernels and checkpointing.
        layout: its micro-batch and degrees.
    """
    num_stages = len(stage_layers(config))
    held = [0] * num_stages
    for rank in range(layout.pipeline):
        own = stages_of_rank(num_stages, layout.pipeline, rank)
        for number, size in zip(own, _rank_bytes(config, layout, rank), strict=True):
            held[number] = size
    return held


def _rank_bytes(config: Config, layout: Layout, rank: int) -> list[int]:
    stages = meta_stages(config, rank, tensor_axis(layout.tensor))
    sizes: list[int] = []
    alive = []
    with Held(*stages) as held:
        for stage in stages:
            entering = entering_state(config, layout, stage)
            alive.append((entering, stage(entering)))
            sizes.append(held.total - sum(sizes))
    return sizes


class Held(TorchDispatchMode):
    """Storages that operators make inside the context, as long as they live; those of the modules don't count."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._outside = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and notes the storages of its results."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default and result.is_meta:
            result = _as_on_a_device(result, args[0])
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._outside:
                    self._sizes[reference] = storage.nbytes()
        return result

    @property
    def total(self) -> int:
        """Bytes of the storages that still live."""
        return sum(size for reference, size in self._sizes.items() if not reference.expired())


def _as_on_a_device(convolved: Tensor, x: Tensor) -> Tensor:
    """The result of a convolution in the layout of its input; the meta device, knowing no device, gives it another."""
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return convolved.contiguous(memory_format=torch.channels_last) if is_last else convolved
