"""Which layers each pipeline stage builds: contiguous, complete, disjoint, and as even in cost as possible.

A folded pipeline has two mirrored stages on every rank, and long skips may not leave their rank.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from operator import add

from megadiff.errors import PlanError

_Fold = tuple[float, float, tuple[int, ...]]  # bytes, largest cost, cuts
_NO_FOLD: _Fold = (inf, inf, ())


def partition_layers(
    costs: Mapping[str, int],
    num_stages: int,
    counts: Sequence[int] = (),
    boundary_bytes: Mapping[str, int] | None = None,
) -> list[tuple[str, ...]]:
    """Cuts a chain into stages whose largest cost is as small as possible; of those, where the fewest bytes cross.

    Args:
        costs: cost of each layer, in chain order (for example forward FLOPs).
        num_stages: how many stages; each gets at least one layer.
        counts: an explicit number of layers for each stage, which overrides the costs.
        boundary_bytes: what crosses a cut just before a layer, by its name; the first layer needs no entry.

    Raises:
        PlanError: fewer layers than stages, or counts that do not add up.
    """
    names = list(costs)
    if len(names) < num_stages:
        raise PlanError(
            f"pipeline_model_parallel_size = {num_stages} needs at least as many layers, the network has {len(names)}"
        )
    if counts:
        cuts = _explicit_cuts(len(names), num_stages, counts)
    else:
        cuts = _even_cuts(list(costs.values()), num_stages, _sizes(names, boundary_bytes))
    return [tuple(names[start:stop]) for start, stop in pairwise(cuts)]


def fold_layers(
    costs: Mapping[str, int],
    num_ranks: int,
    skips: Mapping[str, str],
    counts: Sequence[int] = (),
    boundary_bytes: Mapping[str, int] | None = None,
) -> list[tuple[str, ...]]:
    """Cuts a chain into mirrored stages: rank r runs stages r and 2 num_ranks - 1 - r, and long skips stay on a rank.

    The largest cost of a rank is as small as possible; of those cuts the fewest bytes cross between ranks; of those
    the largest stage is as small as possible.

    Args:
        costs: cost of each layer, in chain order (for example forward FLOPs).
        num_ranks: how many ranks; each gets two stages of at least one layer.
        skips: the earlier layer that a long skip comes from, by the name of the layer that takes it.
        counts: an explicit number of layers for each of the 2 num_ranks stages, which overrides the costs.
        boundary_bytes: what crosses a cut just before a layer, by its name; the first layer needs no entry.

    Returns:
        The layers of the 2 num_ranks stages, in chain order.

    Raises:
        PlanError: too few layers, counts that do not add up or part a skip from its taker, or no cut that parts none.
    """
    names, num_stages = list(costs), 2 * num_ranks
    if len(names) < num_stages:
        raise PlanError(
            f"pipeline_model_parallel_size = {num_ranks} with pipeline_schedule = folded needs at least {num_stages} "
            f"layers, the network has {len(names)}"
        )
    place = {name: index for index, name in enumerate(names)}
    ends = [(place[source], place[taker]) for taker, source in skips.items()]
    if counts:
        cuts = _explicit_cuts(len(names), num_stages, counts)
        _check_skips(names, ends, cuts, counts)
    else:
        cuts = _folded_cuts(list(costs.values()), num_ranks, ends, _sizes(names, boundary_bytes))
    return [tuple(names[start:stop]) for start, stop in pairwise(cuts)]


def _sizes(names: Sequence[str], boundary_bytes: Mapping[str, int] | None) -> list[int]:
    """Bytes that cross a cut at each position; nothing enters the first layer."""
    return [0] * len(names) if boundary_bytes is None else [0, *(boundary_bytes[name] for name in names[1:])]


def _explicit_cuts(num_layers: int, num_stages: int, counts: Sequence[int]) -> list[int]:
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise PlanError(
            f"parallel.partition = {list(counts)} must name {num_stages} positive counts that add up to {num_layers} "
            "layers"
        )
    return [0, *accumulate(counts)]


def _even_cuts(costs: Sequence[int], num_stages: int, sizes: Sequence[int]) -> list[int]:
    """Cut positions of the best partition: first its largest stage, then the fewest bytes with no stage above that."""
    sums = [0, *accumulate(costs)]
    cuts = _cheapest_cuts(sums, num_stages, [0] * len(costs), inf)
    if any(sizes):
        cuts = _cheapest_cuts(sums, num_stages, sizes, max(sums[stop] - sums[start] for start, stop in pairwise(cuts)))
    return cuts


def _cheapest_cuts(sums: Sequence[int], num_stages: int, sizes: Sequence[int], cap: float) -> list[int]:
    """Smallest (bytes, largest stage) with no stage above the cap, by dynamic programming over (stage, end)."""
    size = len(sizes)
    best: list[tuple[float, float]] = [(0, total) if total <= cap else (inf, inf) for total in sums]
    choices: list[list[int]] = []
    for stage in range(1, num_stages):
        row, choice = [(inf, inf)] * (size + 1), [0] * (size + 1)
        for end in range(stage + 1, size + 1):
            for cut in range(max(stage, bisect_left(sums, sums[end] - cap)), end):
                sent, largest = best[cut]
                value = (sent + sizes[cut], max(largest, sums[end] - sums[cut]))
                if value < row[end]:
                    row[end], choice[end] = value, cut
        best = row
        choices.append(choice)
    cuts = [size]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return [0, *reversed(cuts)]


def _check_skips(
    names: Sequence[str], ends: Sequence[tuple[int, int]], cuts: Sequence[int], counts: Sequence[int]
) -> None:
    """Refuses cuts that put the two ends of a skip on different ranks."""
    last = len(counts) - 1
    for source, taker in ends:
        stages = [bisect_right(cuts, end) - 1 for end in (source, taker)]
        ranks = [min(stage, last - stage) for stage in stages]
        if ranks[0] != ranks[1]:
            raise PlanError(
                f"parallel.partition = {list(counts)} puts {names[source]} on rank {ranks[0]} but {names[taker]}, "
                f"which takes its long skip, on rank {ranks[1]}; cut symmetrically or use pipeline_schedule = 1f1b"
            )


@dataclass(frozen=True)
class _Nesting:
    """The pairs of cuts (start, stop) that may bound a rank and all inner ranks.

    Attributes:
        sums: cost of the layers before each position.
        pairs: for each start, the stops with which it parts no skip.
        depths: depths[start][stop] is the largest number of nested pairs, hence of ranks, between two positions.
    """

    sums: list[int]
    pairs: list[set[int]]
    depths: list[list[int]]


def _folded_cuts(
    costs: Sequence[int], num_ranks: int, ends: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> list[int]:
    """Cut positions of the best fold: first its largest rank, then (bytes, largest stage) with no rank above that."""
    size = len(costs)
    pairs = _skip_free_pairs(size, ends)
    nesting = _Nesting([0, *accumulate(costs)], pairs, _nesting_depths(pairs))
    most = nesting.depths[0][size]
    if most < num_ranks:
        raise PlanError(
            f"pipeline_model_parallel_size = {num_ranks} with pipeline_schedule = folded would part a long skip from "
            f"the layer that takes it wherever it is cut; use at most {most} or pipeline_schedule = 1f1b"
        )
    # A cap near the mean leaves few cuts to look at, and whatever is found below a cap is the optimum.
    mean = -(-nesting.sums[-1] // num_ranks)
    slack, found = 1 + mean // 64, _NO_FOLD
    while found is _NO_FOLD:
        found = _best_fold(nesting, num_ranks, mean + slack, [0] * size, add)
        slack *= 2
    return [0, *_best_fold(nesting, num_ranks, found[1], sizes, max)[2], size]


def _skip_free_pairs(size: int, ends: Sequence[tuple[int, int]]) -> list[set[int]]:
    """For each start the stops such that both ends of every skip, or none, lie in start ... stop - 1."""
    touching: list[set[int]] = [set() for _ in range(size)]
    for skip, (source, taker) in enumerate(ends):
        touching[source].add(skip)
        touching[taker].add(skip)
    pairs: list[set[int]] = [set() for _ in range(size + 1)]
    for start in range(size):
        parted: set[int] = set()
        for layer in range(start, size):
            parted = parted ^ touching[layer]
            if not parted:
                pairs[start].add(layer + 1)
    return pairs


def _nesting_depths(pairs: Sequence[set[int]]) -> list[list[int]]:
    """How many pairs nest strictly between two positions, the innermost with a layer for each of its two stages."""
    size = len(pairs) - 1
    depths = [[0] * (size + 1) for _ in range(size + 1)]
    for start in reversed(range(size - 1)):
        for stop in range(start + 2, size + 1):
            own = 1 + depths[start + 1][stop - 1] if stop in pairs[start] else 0
            depths[start][stop] = max(own, depths[start + 1][stop], depths[start][stop - 1])
    return depths


def _best_fold(
    nesting: _Nesting, num_ranks: int, cap: float, sizes: Sequence[int], measure: Callable[[int, int], int]
) -> _Fold:
    """Smallest (bytes, largest measure of a rank's two stage costs) with no rank above the cap; _NO_FOLD if none."""
    sums, pairs, depths = nesting.sums, nesting.pairs, nesting.depths

    @cache
    def innermost(start: int, stop: int) -> _Fold:
        middles = range(start + 1, stop)
        return min((0, measure(sums[cut] - sums[start], sums[stop] - sums[cut]), (cut,)) for cut in middles)

    @cache
    def fold(ranks: int, start: int, stop: int) -> _Fold:
        if ranks == 1:
            return innermost(start, stop) if sums[stop] - sums[start] <= cap else _NO_FOLD
        best = _NO_FOLD
        for left in range(start + 1, bisect_right(sums, sums[start] + cap)):
            first = sums[left] - sums[start]
            lowest = bisect_left(sums, sums[stop] + first - cap)
            highest = bisect_right(sums, sums[left] + (ranks - 1) * cap)
            for right in range(max(left + 2, lowest), min(stop, highest)):
                if right in pairs[left] and depths[left + 1][right - 1] >= ranks - 2:
                    sent, largest, cuts = fold(ranks - 1, left, right)
                    outer = measure(first, sums[stop] - sums[right])
                    value = (sent + sizes[left] + sizes[right], max(largest, outer), (left, *cuts, right))
                    best = min(best, value)
        return best

    return fold(num_ranks, 0, len(sizes))
