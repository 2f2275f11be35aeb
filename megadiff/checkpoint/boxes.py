"""Rectangular parts of a tensor, and how flat ranges turn into them. Knows no files and no ranks.

Letters: d is the number of dims of a tensor.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor.

    Attributes:
        offset: first index in each dim (d numbers).
        size: extent in each dim (d numbers).
        start: flat row-major index, in the tensor that was cut, of the box's first element.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cuts the flat row-major range [start, stop) of a tensor of `shape` into at most 2d - 1 boxes.

    Every box is itself a contiguous flat range; together, in order, they are [start, stop).

    Args:
        shape: sizes of the tensor (d numbers; a scalar is `()`).
        start: first flat index, 0 <= start.
        stop: one past the last flat index, stop <= product of `shape`.
    """
    assert start >= 0 and stop <= math.prod(shape), (tuple(shape), start, stop)
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,), start) if shape else Box((), (), 0)]
    row = math.prod(shape[1:])
    first_full, end_full = -(-start // row), stop // row
    if first_full > end_full:
        return _boxes_of_row(shape, start // row, start, stop)
    boxes = _boxes_of_row(shape, first_full - 1, start, first_full * row)
    if end_full > first_full:
        inner = tuple(shape[1:])
        offset = (first_full,) + (0,) * len(inner)
        boxes.append(Box(offset, (end_full - first_full, *inner), first_full * row))
    return boxes + _boxes_of_row(shape, end_full, end_full * row, stop)


def _boxes_of_row(shape: Sequence[int], index: int, start: int, stop: int) -> list[Box]:
    """The boxes of [start, stop), which lies inside row `index` of the first dim."""
    if start >= stop:
        return []
    base = index * math.prod(shape[1:])
    inner = boxes_of_range(shape[1:], start - base, stop - base)
    return [Box((index, *box.offset), (1, *box.size), base + box.start) for box in inner]


def intersect(
    offset_a: Sequence[int], size_a: Sequence[int], offset_b: Sequence[int], size_b: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The (offset, size) that two boxes of one tensor have in common, or None."""
    offset = tuple(max(a, b) for a, b in zip(offset_a, offset_b, strict=True))
    ends = (min(oa + sa, ob + sb) for oa, sa, ob, sb in zip(offset_a, size_a, offset_b, size_b, strict=True))
    size = tuple(end - begin for begin, end in zip(offset, ends, strict=True))
    return (offset, size) if all(extent > 0 for extent in size) else None


def slices(offset: Sequence[int], size: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Index expression of a box inside a tensor whose first element lies at `origin`."""
    return tuple(slice(o - z, o - z + s) for o, s, z in zip(offset, size, origin, strict=True))
