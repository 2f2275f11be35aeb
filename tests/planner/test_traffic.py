"""Bytes between ranks: what a training step hands to torch.distributed equals the closed form exactly.

Left out of both are the operations on at most two elements; `test_the_scalars_that_are_left_out` says which
these are.
"""

from collections.abc import Mapping

import pytest

from megadiff.config.layout import resolve_layout
from megadiff.dist.traffic import Transfer
from megadiff.planner.memory import stage_parameters
from megadiff.planner.traffic import step_traffic
from tests.parity.networks import TEXT_UNET, UDIT, UNET
from tests.planner import jobs
from tests.planner.networks import small_config
from tests.pool import WorkerPool

LAYOUTS = {
    "dp2": {},
    "tp2": {"tensor": 2},
    "tp2-sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "pp2-uneven": {"pipeline": 2, "partition": (1, 4)},
    "dp2-zero1": {"zero": 1},
    "dp2-zero2": {"zero": 2},
    "dp2-zero3": {"zero": 3},
    "dp2-zero3-released": {
        "zero": 3,
        "zero_limits": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
    },
    "dp2-bf16-zero1": {"zero": 1, "precision": "bf16"},
    "unet-tp2": {"model": UNET, "tensor": 2},
    "unet-pp2": {"model": UNET, "pipeline": 2, "schedule": "1f1b"},
    "unet-pp2-folded": {"model": UNET, "pipeline": 2},
    "text-unet-tp2-sp": {"model": TEXT_UNET, "tensor": 2, "sequence": True},
    "u-shaped-pp2": {"model": UDIT, "pipeline": 2, "schedule": "1f1b"},
    "u-shaped-pp2-folded": {"model": UDIT, "pipeline": 2},
}


@pytest.fixture
def pair(pools: Mapping[int, WorkerPool]) -> WorkerPool:
    return pools[2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_counted_bytes_equal_the_closed_form(pair: WorkerPool, name: str) -> None:
    config = small_config(**LAYOUTS[name])
    layout, parameters = resolve_layout(config, 2), stage_parameters(config)
    for stage, counted, _ in pair.run(jobs.counted_step, config=config):
        assert sum(counted.values()) > 10_000
        assert counted == dict(step_traffic(config, layout, stage, parameters[stage]))


def test_the_scalars_that_are_left_out(pair: WorkerPool) -> None:
    """The squared norm over the model's ranks, a pipeline's two loss values."""
    expected = {
        "dp2": {},
        "tp2": {Transfer("all_reduce", 2): 1},
        "pp2": {Transfer("all_reduce", 2): 1, Transfer("broadcast", 2): 1},
    }
    for name, scalars in expected.items():
        for _, _, counted in pair.run(jobs.counted_step, config=small_config(**LAYOUTS[name])):
            assert counted == scalars


def test_sequence_parallelism_moves_as_much_as_tensor_parallelism_alone() -> None:
    """A sum costs a ring as much as a gather and a scatter together (Korthikanti et al. 2022)."""
    costs = []
    for name in ("tp2", "tp2-sp"):
        config = small_config(num_layers=200, **LAYOUTS[name])
        layout, parameters = resolve_layout(config, 2), stage_parameters(config)
        traffic = step_traffic(config, layout, 0, parameters[0])
        weights = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        costs.append(sum(weights[transfer.kind] * size for transfer, size in traffic.items()))
    assert costs[1] == pytest.approx(costs[0], rel=0.15)  # SP adds the gradient of the modulations


def test_accumulation_repeats_activations_and_not_gradients() -> None:
    config = small_config(tensor=2)
    layout = resolve_layout(config, 4)
    finer = config.model_copy(update={"train": config.train.model_copy(update={"gradient_accumulation_steps": 4})})
    parameters = stage_parameters(config)[0]
    once = step_traffic(config, layout, 0, parameters)
    again = step_traffic(finer, resolve_layout(finer, 4), 0, parameters)
    gathered, summed = Transfer("all_gather", 2), Transfer("all_reduce", 2)
    assert once[gathered] == again[gathered]  # the same samples in smaller micro-batches
    assert once[summed] < again[summed] < 1.1 * once[summed]  # the partial gradients come with every micro-batch
