"""Times two functions in turn, so that both see the same machine, and reports medians."""

import statistics
import time
from collections.abc import Callable

import torch
from report import Row

Work = Callable[[], object]


def interleaved(ours: Work, other: Work, repeats: int, device: str = "cpu") -> tuple[float, float]:
    """Median seconds of one call of each.

    Args:
        ours, other: called alternately, after three calls that are not counted.
        repeats: timed calls of each.
        device: `cuda` times with events on the current stream.
    """
    for _ in range(3):
        ours()
        other()
    clock = _cuda_seconds if device == "cuda" else _cpu_seconds
    times = [(clock(ours), clock(other)) for _ in range(repeats)]
    first, second = zip(*times, strict=True)
    return statistics.median(first), statistics.median(second)


def _cpu_seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cuda_seconds(work: Work) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1000


def geometric_mean(values: list[float]) -> float:
    """The geometric mean, in which ratios are averaged."""
    return statistics.geometric_mean(values)


def speed_row(
    name: str, ours: float, other: float, must: float | None = None, aim: float | None = None, note: str = ""
) -> Row:
    """A row of two times in seconds, whose ratio says how many times faster ours is."""
    return Row(name, ours * 1e3, other * 1e3, "ms", other / ours, must, aim, note=note)
