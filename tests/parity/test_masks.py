"""B06: the loss is the mean over the valid elements of the global batch, however that is cut into micro-batches."""

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.data.batch import Batch
from megadiff.engine.build import make_objective
from tests.parity.jobs import pieces_of, ready_engine
from tests.parity.networks import changed, cut, global_batch, parity_config
from tests.parity.outcome import Piece, assemble, largest_difference
from tests.parity.reference import reference_network
from tests.pool import WorkerPool

NUM_SAMPLES = 6
VALID = (1, 64, 0, 64, 1, 0)  # of 64 positions


def masked_batch(config: Config, valid: Sequence[int]) -> Batch:
    """Six samples with so many valid positions each; what the masks hide is huge."""
    batch = cut(global_batch(config.model, 0), 0, NUM_SAMPLES)
    mask = torch.stack([torch.arange(64) < count for count in valid]).float().view(-1, 1, 8, 8)
    return dataclasses.replace(batch, images=torch.where(mask > 0, batch.images, 1e3), mask=mask)


def masked_config(accumulation: int, pipeline: int = 1, tensor: int = 1) -> Config:
    """No clipping, which would hide a wrong scale; the first moment is the gradient."""
    config = parity_config(precision="fp64", accumulation=1, pipeline=pipeline, tensor=tensor)
    train = {"global_batch_size": NUM_SAMPLES, "gradient_accumulation_steps": accumulation}
    return changed(config, train=train, optimizer={"clip_norm": 0.0})


def train_masked(config: Config, cuts: list[list[int]], valid: tuple[int, ...]) -> tuple[float, float, list[Piece]]:
    """One step; `cuts` are the micro-batch sizes of each data rank."""
    engine = ready_engine(config)
    batch = masked_batch(config, valid)
    index = engine.grid.data.index
    start = sum(sum(sizes) for sizes in cuts[:index])
    parts = []
    for size in cuts[index]:
        parts.append(cut(batch, start, start + size))
        start += size
    result = engine.train_step(parts if engine.needs_data else [])
    gradients = pieces_of(engine, lambda shard: engine.shards.optimizer_state(shard, "exp_avg"))
    return float(result.loss), float(result.grad_norm), gradients


def expected(config: Config, valid: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by the formula: squared errors over the number of valid elements, at least 1."""
    network, objective = reference_network(config), make_objective(config)
    batch = masked_batch(config, valid)
    inputs = objective.prepare(batch.images.double(), batch.labels, batch.sample_ids, 0)
    error = (network((inputs.x_t, inputs.t, inputs.labels)) - inputs.target) * batch.mask
    loss = error.square().sum() / max(1, sum(valid) * config.model.in_channels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in network.named_parameters()}


CASES = {
    "6": (1, {}, [[6]]),
    "4+2": (1, {"accumulation": 2}, [[4, 2]]),
    "1+5": (1, {"accumulation": 2}, [[1, 5]]),
    "3+3": (1, {"accumulation": 2}, [[3, 3]]),
    "dp2": (2, {}, [[3], [3]]),
    "dp2 uneven": (2, {}, [[2], [4]]),
    "dp2 one by one": (2, {"accumulation": 3}, [[1, 1, 1], [1, 1, 1]]),
    "pp2": (2, {"accumulation": 2, "pipeline": 2}, [[3, 3]]),
    "tp2": (2, {"accumulation": 2, "tensor": 2}, [[1, 5]]),
}


@pytest.mark.parametrize("case", CASES)
def test_b06_the_gradient_does_not_depend_on_the_cut(pools: Mapping[int, WorkerPool], case: str) -> None:
    world_size, settings, cuts = CASES[case]
    config = masked_config(**{"accumulation": 1, **settings})
    reports = pools[world_size].run(train_masked, config=config, cuts=cuts, valid=VALID)
    loss, gradients = expected(masked_config(1), VALID)
    found = assemble([piece for report in reports for piece in report[2]])
    difference, name = largest_difference(found, gradients)
    assert difference < 1e-10, name
    assert all(report[0] == pytest.approx(loss, rel=1e-10) for report in reports)


@pytest.mark.parametrize("case", ["3+3", "dp2", "pp2"])
def test_b06_a_batch_without_valid_elements_gives_zeros(pools: Mapping[int, WorkerPool], case: str) -> None:
    world_size, settings, cuts = CASES[case]
    config = masked_config(**{"accumulation": 1, **settings})
    reports = pools[world_size].run(train_masked, config=config, cuts=cuts, valid=(0,) * NUM_SAMPLES)
    assert all(report[:2] == (0.0, 0.0) for report in reports)
    found = assemble([piece for report in reports for piece in report[2]])
    assert all(not gradient.any() for gradient in found.values())


def test_b06_a_rank_whose_samples_are_all_masked_adds_nothing(pools: Mapping[int, WorkerPool]) -> None:
    valid = (0, 0, 0, 64, 1, 0)
    reports = pools[2].run(train_masked, config=masked_config(1), cuts=[[3], [3]], valid=valid)
    loss, gradients = expected(masked_config(1), valid)
    found = assemble([piece for report in reports for piece in report[2]])
    assert largest_difference(found, gradients)[0] < 1e-10
    assert reports[0][0] == pytest.approx(loss, rel=1e-10)
