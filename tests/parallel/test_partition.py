"""B08: every layer is on exactly one stage, the cut is the best there is, and long skips stay on a folded rank."""

import re
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadiff.config.schema import ModelConfig
from megadiff.errors import PlanError
from megadiff.models import build_network, chain_builders
from megadiff.models.chain import Chain
from megadiff.models.flops import layer_flops
from megadiff.parallel.partition import fold_layers, partition_layers


def named(costs: Sequence[int]) -> dict[str, int]:
    """Costs of layers with made-up names."""
    return {f"layer.{index}": cost for index, cost in enumerate(costs)}


def largest_stage(costs: dict[str, int], stages: Sequence[Sequence[str]]) -> int:
    """The cost of the most expensive stage."""
    return max(sum(costs[name] for name in stage) for stage in stages)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_b08_every_layer_is_on_exactly_one_stage(num_stages: int) -> None:
    for num_layers in range(1, 41):
        costs = named([1] * num_layers)
        if num_layers < num_stages:
            with pytest.raises(PlanError, match=f"= {num_stages} .* the network has {num_layers}"):
                partition_layers(costs, num_stages)
            continue
        stages = partition_layers(costs, num_stages)
        assert len(stages) == num_stages and all(stages)
        assert [name for stage in stages for name in stage] == list(costs)
        assert largest_stage(costs, stages) == -(-num_layers // num_stages)


def every_partition(names: Sequence[str], num_stages: int) -> list[list[Sequence[str]]]:
    """All contiguous partitions into non-empty stages."""
    size = len(names)
    every = (pairwise((0, *cuts, size)) for cuts in combinations(range(1, size), num_stages - 1))
    return [[names[start:stop] for start, stop in parts] for parts in every]


def ranks_of(stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """The rank of each layer of a folded pipeline."""
    return {name: min(index, len(stages) - 1 - index) for index, stage in enumerate(stages) for name in stage}


def fold_score(costs: dict[str, int], sizes: dict[str, int], stages: Sequence[Sequence[str]]) -> tuple[int, int, int]:
    """(largest rank, bytes between ranks, largest stage) of a fold."""
    loads = [sum(costs[name] for name in stage) for stage in stages]
    middle = len(stages) // 2
    sent = sum(sizes[stage[0]] for index, stage in enumerate(stages) if index not in (0, middle))
    return max(a + b for a, b in zip(loads, reversed(loads), strict=True)), sent, max(loads)


def mirrored(num_layers: int, every: int = 1) -> dict[str, str]:
    """Skips from each `every`-th layer of the first half, bar the first layer, to its mirror image."""
    return {f"layer.{num_layers - 1 - i}": f"layer.{i}" for i in range(1, num_layers // 2, every)}


@st.composite
def small_chains(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    """Costs, boundary bytes and long skips of a chain of at most nine layers."""
    size = draw(st.integers(1, 9))
    costs = named(draw(st.lists(st.integers(0, 20), min_size=size, max_size=size)))
    sizes = named(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    ends = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=4))
    return costs, sizes, {f"layer.{max(pair)}": f"layer.{min(pair)}" for pair in ends if pair[0] != pair[1]}


@given(chain=small_chains(), num_stages=st.integers(1, 5))
def test_b08_the_cut_is_optimal(chain: tuple[dict[str, int], dict[str, int], dict[str, str]], num_stages: int) -> None:
    costs, sizes, _ = chain
    names = list(costs)
    if len(names) < num_stages:
        return

    def score(stages: Sequence[Sequence[str]]) -> tuple[int, int]:
        return largest_stage(costs, stages), sum(sizes[stage[0]] for stage in stages[1:])

    every = every_partition(names, num_stages)
    for stages in (partition_layers(costs, num_stages), partition_layers(costs, num_stages, (), sizes)):
        assert [name for stage in stages for name in stage] == names and all(stages)
        assert largest_stage(costs, stages) == min(largest_stage(costs, other) for other in every)
    assert score(stages) == min(map(score, every))


@given(chain=small_chains(), num_ranks=st.integers(1, 4))
def test_b08_the_fold_is_optimal_and_keeps_every_skip_on_its_rank(
    chain: tuple[dict[str, int], dict[str, int], dict[str, str]], num_ranks: int
) -> None:
    costs, sizes, skips = chain
    names = list(costs)

    def folds(ranks: int) -> list[list[Sequence[str]]]:
        every = every_partition(names, 2 * ranks)
        placed = ((stages, ranks_of(stages)) for stages in every)
        return [stages for stages, rank in placed if all(rank[a] == rank[b] for a, b in skips.items())]

    possible = folds(num_ranks)
    if not possible:
        most = max((ranks for ranks in range(1, num_ranks) if folds(ranks)), default=0)
        reason = f"use at most {most} or" if len(names) >= 2 * num_ranks else f"at least {2 * num_ranks} layers"
        with pytest.raises(PlanError, match=reason):
            fold_layers(costs, num_ranks, skips, (), sizes)
        return
    stages = fold_layers(costs, num_ranks, skips, (), sizes)
    assert [name for stage in stages for name in stage] == names
    assert [list(stage) for stage in stages] in [[list(stage) for stage in other] for other in possible]
    assert fold_score(costs, sizes, stages) == min(fold_score(costs, sizes, other) for other in possible)


@pytest.mark.parametrize("counts", [(5,), (1, 1, 4), (0, 6), (7, -1), (3, 2)])
def test_b08_explicit_counts_must_add_up(counts: tuple[int, ...]) -> None:
    message = re.escape(f"parallel.partition = {list(counts)} must name 2 positive counts that add up to 6")
    with pytest.raises(PlanError, match=message):
        partition_layers(named([1] * 6), 2, counts)


def test_explicit_counts_override_the_costs() -> None:
    stages = partition_layers(named([1] * 6), 3, (1, 3, 2))
    assert [len(stage) for stage in stages] == [1, 3, 2]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_b08_the_stages_hold_the_parameters_of_the_whole_network(num_stages: int) -> None:
    model = ModelConfig(hidden_size=16, num_heads=2, num_layers=5, input_size=4, qk_norm=True)
    whole = {name: p.shape for name, p in build_network(model, 0).named_parameters()}
    found: dict[str, object] = {}
    for names in partition_layers(layer_flops(model), num_stages):
        stage = {name: p.shape for name, p in Chain(chain_builders(model), only=names).named_parameters()}
        assert not found.keys() & stage.keys()
        found |= stage
    assert found == whole


def test_fewest_bytes_cross_among_equally_even_cuts() -> None:
    costs, sizes = named([1, 1, 1, 1, 3]), named([0, 9, 2, 9, 9])
    assert [len(stage) for stage in partition_layers(costs, 3, (), sizes)] == [2, 2, 1]
    assert [len(stage) for stage in partition_layers(costs, 3, (), named([0, 2, 9, 9, 9]))] == [1, 3, 1]


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_b08_a_deep_unet_folds_over_many_ranks(num_ranks: int, every: int) -> None:
    costs, skips = named([10**12 + 7 * index % 10**9 for index in range(130)]), mirrored(130, every)
    stages = fold_layers(costs, num_ranks, skips, (), named(range(130)))
    rank = ranks_of(stages)
    assert len(stages) == 2 * num_ranks and all(stages)
    assert [name for stage in stages for name in stage] == list(costs)
    assert all(rank[taker] == rank[source] for taker, source in skips.items())
    loads = [sum(costs[name] for name in costs if rank[name] == index) for index in range(num_ranks)]
    # A step of the fold is a skip's two ends and what lies between it and the next, so no rank is off by more.
    assert max(loads) <= sum(loads) / num_ranks + 2 * every * max(costs.values())


def test_b08_a_fold_of_a_network_without_skips_may_be_asymmetric() -> None:
    costs = named([4, 4, 1, 1, 1, 1, 1, 1])
    assert fold_score(costs, costs, fold_layers(costs, 2, {}))[0] == 7
    assert max(map(len, fold_layers(named([1] * 130), 8, {}))) < 17


def test_fewest_bytes_leave_a_folded_rank() -> None:
    sizes = named([0, 9, 1, 9, 50, 9, 1, 9])
    stages = fold_layers(named([1] * 8), 2, {}, (), sizes)
    assert [len(stage) for stage in stages] == [2, 2, 2, 2]


def test_b08_fewer_layers_than_folded_stages_are_refused() -> None:
    message = (
        "pipeline_model_parallel_size = 8 with pipeline_schedule = folded needs at least 16 layers, the network has 9"
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        fold_layers(named([1] * 9), 8, {})


def test_b08_a_network_that_folds_over_fewer_ranks_says_over_how_many() -> None:
    skips = {"layer.9": "layer.3", "layer.5": "layer.4"}
    with pytest.raises(PlanError, match=r"size = 5 .* part a long skip .* use at most 3 or pipeline_schedule = 1f1b"):
        fold_layers(named([1] * 10), 5, skips)
    assert len(fold_layers(named([1] * 10), 3, skips)) == 6


def test_b08_explicit_counts_of_a_fold() -> None:
    costs, skips = named([1] * 10), mirrored(10)
    stages = fold_layers(costs, 2, skips, (2, 3, 3, 2))
    assert [len(stage) for stage in stages] == [2, 3, 3, 2]
    with pytest.raises(PlanError, match="must name 4 positive counts that add up to 10 layers"):
        fold_layers(costs, 2, skips, (2, 3, 3, 3))
    message = "puts layer.2 on rank 1 but layer.7, which takes its long skip, on rank 0; cut symmetrically or use"
    with pytest.raises(PlanError, match=message):
        fold_layers(costs, 2, skips, (2, 3, 2, 3))
