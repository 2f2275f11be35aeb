"""Which layers each pipeline stage builds: contiguous, complete, disjoint, and as even in cost as possible."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from megadiff.errors import PlanError


def partition_layers(costs: Mapping[str, int], num_stages: int, counts: Sequence[int] = ()) -> list[tuple[str, ...]]:
    """Cuts a chain into stages whose largest cost is as small as possible.

    Args:
        costs: cost of each layer, in chain order (for example forward FLOPs).
        num_stages: how many stages; each gets at least one layer.
        counts: an explicit number of layers for each stage, which overrides the costs.

    Raises:
        PlanError: fewer layers than stages, or counts that do not add up.
    """
    names = list(costs)
    if len(names) < num_stages:
        raise PlanError(
            f"pipeline_model_parallel_size = {num_stages} needs at least as many layers, the network has {len(names)}"
        )
    if counts and (len(counts) != num_stages or sum(counts) != len(names) or min(counts) < 1):
        raise PlanError(
            f"parallel.partition = {list(counts)} must name {num_stages} positive counts that add up to {len(names)} "
            "layers"
        )
    cuts = [0, *accumulate(counts)] if counts else _even_cuts(list(costs.values()), num_stages)
    return [tuple(names[start:stop]) for start, stop in pairwise(cuts)]


def _even_cuts(costs: Sequence[int], num_stages: int) -> list[int]:
    """Cut positions of the partition with the smallest largest stage, by dynamic programming over (stage, end)."""
    sums = [0, *accumulate(costs)]
    size = len(costs)
    best: list[list[float]] = [[float(total) for total in sums]]
    choice: list[list[int]] = [[0] * (size + 1)]
    for stage in range(1, num_stages):
        row, cut_row = [float("inf")] * (size + 1), [0] * (size + 1)
        for end in range(stage + 1, size + 1):
            for cut in range(stage, end):
                worst = max(best[stage - 1][cut], sums[end] - sums[cut])
                if worst < row[end]:
                    row[end], cut_row[end] = worst, cut
        best.append(row)
        choice.append(cut_row)
    cuts = [size]
    for stage in range(num_stages - 1, 0, -1):
        cuts.append(choice[stage][cuts[-1]])
    return [0, *reversed(cuts)]
