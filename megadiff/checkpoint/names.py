"""What a naming convention has to state; one table serves export and import."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megadiff.config.schema import ModelConfig
from megadiff.errors import CheckpointError
from megadiff.models import meta_chain

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class NameRow:
    """One tensor of the other side.

    Attributes:
        theirs: its name there.
        ours: the parameters whose concatenation on dim 0 it is; none for the fixed position table. A
            parameter may occur in several rows, which are then copies of each other.
    """

    theirs: str
    ours: tuple[str, ...]


@dataclass(frozen=True)
class Origin:
    """What is known of weights that are imported, besides their values.

    Attributes:
        shapes: shape of every tensor by its name there.
        metadata: the text pairs of the safetensors header.
        config: content of config.json, if there is one.
        expected: the network that the user's config describes, if one was given.
        num_heads: what the user stated, if anything.
        accept_norm_eps: the user accepts that LayerNorms are computed with this project's epsilon.
    """

    shapes: Shapes
    metadata: Mapping[str, str]
    config: Mapping[str, Any] | None = None
    expected: ModelConfig | None = None
    num_heads: int | None = None
    accept_norm_eps: bool = False

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Shape of a tensor that must be there with so many dims.

        Raises:
            CheckpointError: it is not, so the weights follow another naming convention.
        """
        shape = self.shapes.get(name, ())
        if len(shape) != dims or 0 in shape:
            raise CheckpointError(f"the weights hold no {name} with {dims} dims; choose the convention they follow")
        return shape


@dataclass(frozen=True)
class Convention:
    """A naming convention for the weights of a network.

    Attributes:
        title: how messages call it.
        stem: file name without `.safetensors`.
        rows: the tensors there, in order, for a network.
        objection: why a network cannot be held without a change of its results, or None.
        config_json: content of the config.json that readers there expect, or None for no such file.
        read_model: the network that imported weights belong to.
    """

    title: str
    stem: str
    rows: Callable[[ModelConfig], list[NameRow]]
    objection: Callable[[ModelConfig], str | None]
    config_json: Callable[[ModelConfig], dict[str, Any] | None]
    read_model: Callable[[Origin], ModelConfig]


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global shape of every parameter of a network, in the order of the chain; allocates nothing."""
    return {name: tuple(parameter.shape) for name, parameter in meta_chain(model).named_parameters()}


def row_shape(row: NameRow, shapes: Shapes, model: ModelConfig) -> tuple[int, ...]:
    """Shape of a tensor of the other side, from the shapes of our parameters; (1, N, D) of a position table."""
    if not row.ours:
        return (1, (model.input_size // model.patch_size) ** 2, model.hidden_size)
    parts = [shapes[name] for name in row.ours]
    return (sum(part[0] for part in parts), *parts[0][1:])


def with_affine(ours: str, theirs: str) -> list[NameRow]:
    """Rows of the weight and the bias of a layer that both sides have."""
    return [NameRow(f"{theirs}.{leaf}", (f"{ours}.{leaf}",)) for leaf in ("weight", "bias")]
