"""The shapes of the tensors between the layers of a network, read off a run on the meta device."""

from collections.abc import Mapping
from functools import cache

import torch

from megadiff.config.schema import ModelConfig
from megadiff.models.build import long_skips, meta_chain
from megadiff.models.sizes import text_size
from megadiff.ops.backends import Backends

Shape = tuple[int, ...]


@cache
def entering_shapes(model: ModelConfig) -> Mapping[str, tuple[Shape, ...]]:
    """Shapes, without the batch dim, of the state that enters each layer, without long skips."""
    chain, skips = meta_chain(model, Backends(attention="math", kernels="off")).to("meta").eval(), long_skips(model)
    state: tuple[torch.Tensor, ...] | torch.Tensor = meta_inputs(model, batch=1)
    shapes: dict[str, tuple[Shape, ...]] = {}
    given: dict[str, torch.Tensor] = {}
    for name in chain.layer_names:
        shapes[name] = tuple(tuple(tensor.shape[1:]) for tensor in state)
        taken = (given[skips[name]],) if name in skips else ()
        with torch.no_grad():
            state = chain.layer(name)((*state, *taken))
        given[name] = state[0]
    return shapes


def meta_inputs(model: ModelConfig, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the network takes, (x_t, t, labels), without values."""
    with torch.device("meta"):
        size = text_size(model)
        labels = torch.empty(batch, size) if size else torch.empty(batch, dtype=torch.int64)
        x_t = torch.empty(batch, model.in_channels, model.input_size, model.input_size)
        return x_t, torch.empty(batch, dtype=torch.int64), labels


@cache
def skip_shapes(model: ModelConfig) -> Mapping[str, Shape]:
    """Shape, without the batch dim, of each long skip, by the layer that it comes from."""
    shapes, names = entering_shapes(model), list(entering_shapes(model))
    return {source: shapes[names[names.index(source) + 1]][0] for source in long_skips(model).values()}
