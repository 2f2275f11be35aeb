"""Flat ranges as boxes: exact cover, order and count for every range of drawn shapes."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megadiff.checkpoint.boxes import boxes_of_range, intersect, slices

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_boxes_are_the_range_in_order(drawn: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = drawn
    flat = torch.arange(math.prod(shape)).view(shape)
    boxes = boxes_of_range(shape, start, stop)
    parts = [flat[slices(box.offset, box.size, (0,) * len(shape))].reshape(-1) for box in boxes]
    joined = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    assert joined.tolist() == list(range(start, stop))
    assert [box.start for box in boxes] == [int(part[0]) for part in parts]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_intersection_is_the_common_elements(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))

    def box() -> tuple[list[int], list[int]]:
        offset = [data.draw(st.integers(0, extent - 1)) for extent in shape]
        return offset, [data.draw(st.integers(1, extent - o)) for extent, o in zip(shape, offset, strict=True)]

    def mask(offset: list[int], size: list[int]) -> torch.Tensor:
        result = torch.zeros(shape, dtype=torch.bool)
        result[slices(offset, size, [0] * len(shape))] = True
        return result

    a, b = box(), box()
    common = intersect(*a, *b)
    expected = mask(*a) & mask(*b)
    assert torch.equal(expected, torch.zeros_like(expected) if common is None else mask(*map(list, common)))
