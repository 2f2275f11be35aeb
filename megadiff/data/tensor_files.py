"""Rows of tensors in safetensors files: their checks, and texts among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megadiff.config.schema import ModelConfig
from megadiff.errors import DataError
from megadiff.models.sizes import text_size

_FLOATS = ("F16", "BF16", "F32", "F64")
_INTEGERS = ("U8", "I8", "I16", "I32", "I64")
RowShape = tuple[int, ...]


@dataclass(frozen=True)
class TextShape:
    """A text: tokens (length, width), and a pooled vector (pooled,), without which pooled is 0."""

    length: int
    width: int
    pooled: int

    def tensors(self) -> dict[str, RowShape]:
        """The tensors that hold texts in a file, and the shape of a row of each."""
        pooled = {"pooled": (self.pooled,)} if self.pooled else {}
        return {"tokens": (self.length, self.width), **pooled}


def text_shape(model: ModelConfig) -> TextShape | None:
    """The texts that a network reads, or None."""
    return TextShape(model.text_length, model.cross_attention_dim, model.pooled_dim) if text_size(model) else None


def join_text(tokens: Tensor, pooled: Tensor | None) -> Tensor:
    """A text as one float32 vector (F,): tokens (L, E) row by row, then the pooled vector (P,)."""
    return torch.cat([part.float().flatten() for part in (tokens, pooled) if part is not None])


def read_texts(path: Path, shape: TextShape) -> list[Tensor]:
    """All texts of a file, (F,) float32 each.

    Raises:
        DataError: the file is missing or damaged, or its tensors do not fit.
    """
    try:
        file = safe_open(path, framework="pt")
        tensors = {name: open_tensor(file, path, name, shape.tensors()) for name in shape.tensors()}
        count = check_rows(path, tensors, shape.tensors())
        pooled = tensors["pooled"][:] if shape.pooled else [None] * count
        texts = [join_text(*text) for text in zip(tensors["tokens"][:], pooled, strict=True)]
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read {path} as safetensors ({error}); write the file again") from error
    if not texts or not all(bool(text.isfinite().all()) for text in texts):
        raise DataError(f"{path} holds no text, or one that is not finite; write the file again")
    return texts


def open_tensor(file: Any, path: Path, name: str, expected: Mapping[str, RowShape]) -> Any:
    """A slice object of a tensor, which reads rows on demand.

    Raises:
        DataError: the tensor is missing or of the wrong kind of numbers.
    """
    if name not in file.keys():  # noqa: SIM118  # no dict
        wanted = " and ".join(f"{key} {_shown(shape)}" for key, shape in expected.items())
        raise DataError(f"{path} has no tensor {name!r}; store {wanted}")
    tensor = file.get_slice(name)
    kinds, word = (_INTEGERS, "integers") if name == "labels" else (_FLOATS, "floats")
    if tensor.get_dtype() not in kinds:
        raise DataError(f"{path}: {name} are {tensor.get_dtype()}; store {word}")
    return tensor


def check_rows(path: Path, tensors: Mapping[str, Any], expected: Mapping[str, RowShape]) -> int:
    """The number of rows N; DataError unless every tensor is (N, *expected) with that N."""
    found = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    rows = next(iter(found.values()))[:1]
    if any(shape[:1] != rows or shape[1:] != expected[name] for name, shape in found.items()):
        shown = " and ".join(f"{name} {shape}" for name, shape in found.items())
        wanted = " and ".join(_shown(expected[name]) for name in found)
        raise DataError(
            f"{path}: {shown} do not fit {wanted} of the network's settings (model.in_channels, model.input_size, and "
            "the sizes of a text); change these or write the file again"
        )
    return rows[0]


def _shown(shape: RowShape) -> str:
    return f"(N, {', '.join(map(str, shape))})" if shape else "(N,)"
