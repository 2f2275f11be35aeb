"""Memory per rank: a live engine against the closed form, and the closed form against the network."""

from collections.abc import Mapping

import pytest

from megadiff.config.layout import resolve_layout
from megadiff.config.schema import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megadiff.engine.optimizer import count_parameters, state_keys
from megadiff.models import chain_builders
from megadiff.models.chain import Chain
from megadiff.planner.memory import num_state_tensors, rank_memory, stage_parameters
from tests.planner import jobs
from tests.planner.networks import small_config
from tests.pool import WorkerPool


@pytest.fixture
def pair(pools: Mapping[int, WorkerPool]) -> WorkerPool:
    return pools[2]


@pytest.mark.parametrize(
    ("zero", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")]
)
def test_memory_is_that_of_the_closed_form(pair: WorkerPool, zero: int, precision: str) -> None:
    # At ZeRO 2 one gradient on the border between the partitions is held whole: a smaller share of a deeper
    # network.
    config = small_config(num_layers=12 if zero == 2 else 3, zero=zero, precision=precision)
    predicted = rank_memory(config, resolve_layout(config, 2), stage_parameters(config)[0])
    for measured in pair.run(jobs.measured_memory, config=config):
        for name, size in measured.items():
            assert size == pytest.approx(getattr(predicted, name), rel=0.05), f"{name} at ZeRO {zero}"


def test_memory_of_a_tensor_rank(pair: WorkerPool) -> None:
    """Among others that a shard is not a view of the whole parameter, which would stay in memory with it."""
    config = small_config(tensor=2)
    predicted = rank_memory(config, resolve_layout(config, 2), stage_parameters(config)[0])
    for measured in pair.run(jobs.measured_memory, config=config):
        assert measured == {name: getattr(predicted, name) for name in measured}


def test_what_shrinks_with_the_zero_stage() -> None:
    """Masters, optimizer state and average from stage 1 on, gradients from 2 on, weights at 3."""
    rows = []
    for zero in range(4):
        config = small_config(zero=zero)
        rows.append(rank_memory(config, resolve_layout(config, 4), stage_parameters(config)[0]))
    whole, first, second, third = rows
    for name in ("optimizer", "average"):
        sizes = [getattr(row, name) / getattr(whole, name) for row in rows]
        assert sizes == pytest.approx([1, 1 / 4, 1 / 4, 1 / 4], rel=0.01)
    assert first.gradients == whole.gradients
    assert second.gradients == pytest.approx(whole.gradients / 4, rel=0.01)
    assert second.weights == whole.weights
    assert third.weights == pytest.approx(whole.weights / 4, rel=0.01)
    assert whole.masters == 0
    assert first.masters == pytest.approx(whole.weights / 4, rel=0.01)


def test_half_precision_has_masters_and_sums_gradients_in_float32() -> None:
    config = small_config(zero=1, precision="bf16")
    memory = rank_memory(config, resolve_layout(config, 1), stage_parameters(config)[0])
    assert memory.masters == memory.average == 2 * memory.weights
    assert memory.gradients == 3 * memory.weights  # the float32 sum and the last micro-batch's own


def test_stages_and_tensor_ranks_add_up_to_the_network() -> None:
    model = ModelConfig(hidden_size=64, num_heads=4, num_layers=5, qk_norm=True)
    parallel = ParallelConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=3)
    stages = stage_parameters(Config(model=model, parallel=parallel))
    network = count_parameters(Chain(chain_builders(model)))
    assert len(stages) == 3
    assert sum(4 * stage.sharded + stage.replicated for stage in stages) == network
    assert all(sum(stage.sizes) == stage.total for stage in stages)


def test_no_average_and_no_momentum_cost_nothing() -> None:
    config = Config(
        optimizer=OptimizerConfig(name="sgd"),
        ema={"enabled": False},  # type: ignore[arg-type]
        train=TrainConfig(global_batch_size=4),
    )
    memory = rank_memory(config, resolve_layout(config, 1), stage_parameters(config)[0])
    assert (memory.optimizer, memory.average) == (0, 0)
    assert memory.total == memory.weights + memory.gradients


@pytest.mark.parametrize(
    "optimizer",
    [OptimizerConfig(), OptimizerConfig(name="sgd"), OptimizerConfig(name="sgd", momentum=0.9)],
    ids=["adamw", "sgd", "momentum"],
)
def test_state_tensors_are_those_that_the_optimizer_keeps(optimizer: OptimizerConfig) -> None:
    assert num_state_tensors(optimizer) == len(state_keys(optimizer))
