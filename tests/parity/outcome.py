"""What a training run shows, on one process or put together from many, and how far two of them differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A flat range of a box of one logical parameter, as one rank owns it; values are 1-D."""

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    stop: int
    values: Tensor


@dataclass(frozen=True)
class Outcome:
    """Losses, norms and rates by step; gradients of the first step, weights and averages of the last."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    averages: Mapping[str, Tensor]
    prediction: Tensor
    averaged_prediction: Tensor


def assemble(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """Full parameters from the pieces of all ranks.

    Raises:
        AssertionError: a value is missing, or two ranks that own the same value disagree by a single bit.
    """
    full: dict[str, Tensor] = {}
    for piece in pieces:
        empty = torch.full(piece.full_shape, math.nan, dtype=piece.values.dtype)
        box = full.setdefault(piece.name, empty)[
            tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))
        ]
        flat = box.reshape(-1).clone()
        former = flat[piece.start : piece.stop]
        known = ~former.isnan()
        assert torch.equal(former[known], piece.values[known]), f"ranks hold different values of {piece.name}"
        flat[piece.start : piece.stop] = piece.values
        box.copy_(flat.view(piece.size))
    missing = [name for name, value in full.items() if value.isnan().any()]
    assert not missing, f"no rank owns some values of {missing}"
    return full


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference over all names, relative to the largest expected value, and its name."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    scale = max(value.abs().max().item() for value in expected.values())
    differences = {}
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        difference = (found[name].double() - value.double()).abs().max().item()
        differences[name] = math.inf if math.isnan(difference) else difference / scale
    worst = max(differences, key=lambda name: differences[name])
    return differences[worst], worst


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two series."""
    assert len(found) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def differences(found: Outcome, expected: Outcome) -> dict[str, tuple[float, str]]:
    """Every compared quantity with its largest relative difference and where that is."""
    return {
        "loss": (relative(found.losses, expected.losses), ""),
        "norm": (relative(found.norms, expected.norms), ""),
        "gradient": largest_difference(found.gradients, expected.gradients),
        "weights": largest_difference(found.weights, expected.weights),
        "average": largest_difference(found.averages, expected.averages),
        "predict": largest_difference({"": found.prediction}, {"": expected.prediction}),
        "predict average": largest_difference({"": found.averaged_prediction}, {"": expected.averaged_prediction}),
    }
