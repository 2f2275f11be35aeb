"""What crosses from one pipeline stage to the next: the tensors of a state, packed into one message."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megadiff.config.layout import is_folded
from megadiff.config.schema import Config, ModelConfig
from megadiff.models import long_skips
from megadiff.models.states import Shape, entering_shapes, skip_shapes
from megadiff.parallel.plan import layers_on_shards
from megadiff.parallel.plans import plan_for

_MAP_DIMS = 3  # (C, H, W): feature maps are channels-last


@dataclass(frozen=True)
class Boundary:
    """The layout of a packed state.

    Attributes:
        shapes: of its tensors, without the batch dim.
    """

    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        """Elements of one sample."""
        return sum(prod(shape) for shape in self.shapes)

    def pack(self, state: tuple[Tensor, ...]) -> Tensor:
        """Joins the tensors of a state, (B, *shape) each, to (B, numel), feature maps pixel by pixel."""
        return torch.cat([_to_last(tensor).flatten(1) for tensor in state], dim=1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """The state again; feature maps are channels-last."""
        parts = packed.split([prod(shape) for shape in self.shapes], dim=1)
        return tuple(_from_last(part, shape) for part, shape in zip(parts, self.shapes, strict=True))


def _to_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1) if x.dim() == 1 + _MAP_DIMS else x


def _from_last(x: Tensor, shape: Shape) -> Tensor:
    if len(shape) != _MAP_DIMS:
        return x.unflatten(1, shape)
    # A copy for a map that other tensors follow in its row: without one its strides are no channels-last strides.
    flat = x.unflatten(1, (*shape[1:], shape[0])).movedim(-1, 1)
    return flat.contiguous(memory_format=torch.channels_last)


def boundary_before(config: Config, layer: str) -> Boundary:
    """What a stage that begins with `layer` is sent: its state, and unless the pipeline is folded the long skips.

    In a folded pipeline skips stay on their rank. Under sequence parallelism tokens are this tensor rank's.
    """
    return state_before(config, layer, with_skips=not is_folded(config))


def state_before(config: Config, layer: str, with_skips: bool) -> Boundary:
    """The state that enters a layer, with the long skips that this or a later layer takes if they are asked for."""
    model, parallel = config.model, config.parallel
    shapes = entering_shapes(model)
    order = list(shapes)
    on_shards = layers_on_shards(plan_for(model), order) if parallel.sequence_parallel else set()

    def local(shape: Shape, before: str) -> Shape:
        """A shape of tokens as one rank holds it before a layer."""
        if before not in on_shards:
            return shape
        return (shape[0] // parallel.tensor_model_parallel_size, *shape[1:])

    first, *others = shapes[layer]
    skips = crossing_skips(model, layer) if with_skips else ()
    after = {source: order[order.index(source) + 1] for source in skips}
    travelling = (local(skip_shapes(model)[source], after[source]) for source in skips)
    return Boundary((local(first, layer), *others, *travelling))


def crossing_skips(model: ModelConfig, layer: str) -> tuple[str, ...]:
    """The layers before `layer` whose skip it or a later layer takes, in the order of the chain."""
    place = {name: index for index, name in enumerate(entering_shapes(model))}
    sources = [s for taker, s in long_skips(model).items() if place[s] < place[layer] <= place[taker]]
    return tuple(sorted(sources, key=place.__getitem__))
