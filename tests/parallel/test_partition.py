"""B08: every layer is on exactly one stage, the cut is as even as possible; fewer layers than stages are refused."""

import re
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadiff.config.schema import ModelConfig
from megadiff.errors import PlanError
from megadiff.models import build_network, chain_builders
from megadiff.models.chain import Chain
from megadiff.models.flops import layer_flops
from megadiff.parallel.partition import partition_layers


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


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), num_stages=st.integers(1, 5))
def test_b08_the_cut_is_optimal(costs: list[int], num_stages: int) -> None:
    if len(costs) < num_stages:
        return
    layers = named(costs)
    names = list(layers)
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    every = [[names[a:b] for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)] for cut in cuts]
    best = min(largest_stage(layers, stages) for stages in every)
    stages = partition_layers(layers, num_stages)
    assert largest_stage(layers, stages) == best
    assert [name for stage in stages for name in stage] == names and all(stages)


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
