"""B18, B19: the rate that the optimizer uses is a function of optimizer steps alone, on every layout."""

import math
from collections.abc import Mapping

import pytest
import torch

from megadiff.config.schema import Config, OptimizerConfig
from megadiff.engine.optimizer import learning_rate, make_optimizer, set_learning_rate
from megadiff.models import build_network
from tests.parity.jobs import ready_engine, train_one_step
from tests.parity.networks import DIT, UNET, changed, parity_config
from tests.pool import WorkerPool

STEPS, WARMUP, RATE, FLOOR = 20, 8, 1e-2, 0.1


def scheduled(**settings: object) -> Config:
    """A run of 20 steps, 8 of them warm-up, down to a tenth of the rate."""
    optimizer = {"warmup_steps": WARMUP, "lr": RATE, "min_lr_ratio": FLOOR}
    return changed(parity_config(**settings), train={"steps": STEPS}, optimizer=optimizer)


def closed_form(step: int) -> float:
    """Linear warm-up, then half a cosine whose last point is the last step."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / (STEPS - 1 - WARMUP)
    return RATE * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)


def record_rates(config: Config, start: int, stop: int) -> list[float]:
    """The rate at each step, read where the optimizer steps; the engine is built at step `start`."""
    engine, used = ready_engine(config), set()
    engine.steps, engine.samples = start, start * config.train.global_batch_size

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        used.update(group["lr"] for group in optimizer.param_groups)  # ZeRO steps one group after the other

    engine.shards.optimizer.register_step_pre_hook(record)
    rates = []
    for step in range(start, stop):
        used.clear()
        result = train_one_step(engine, step)
        assert used == {result.lr}
        rates.append(result.lr)
    return rates


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {"accumulation": 4}),
        (2, {"accumulation": 2}),
        (2, {"accumulation": 4, "pipeline": 2}),
        (2, {"accumulation": 2, "zero_stage": 1}),
        (2, {"accumulation": 2, "zero_stage": 3}),
    ],
    ids=["dp1 acc4", "dp2 acc2", "pp2 acc4", "zero1 acc2", "zero3 acc2"],
)
def test_b19_the_table_of_rates_is_the_same_on_every_layout(
    pools: Mapping[int, WorkerPool], world_size: int, settings: dict[str, object]
) -> None:
    for rates in pools[world_size].run(record_rates, config=scheduled(**settings), start=0, stop=STEPS):
        assert rates == pytest.approx([closed_form(step) for step in range(STEPS)], rel=1e-12)
        assert rates[-1] == pytest.approx(RATE * FLOOR, rel=1e-12), "the last step reaches the floor"
        assert max(rates) == pytest.approx(RATE, rel=1e-12)


@pytest.mark.parametrize("start", [7, 13])
def test_b18_an_engine_that_goes_on_uses_the_rates_of_the_uninterrupted_one(
    pools: Mapping[int, WorkerPool], start: int
) -> None:
    config = scheduled()
    (rates,) = pools[1].run(record_rates, config=config, start=start, stop=STEPS)
    assert rates == [learning_rate(step, STEPS, config.optimizer) for step in range(start, STEPS)]


def test_a_constant_rate_follows_the_warm_up() -> None:
    config = OptimizerConfig(lr=RATE, warmup_steps=4, lr_schedule="constant")
    table = [RATE / 4, RATE / 2, RATE * 3 / 4, RATE, RATE, RATE]
    assert [learning_rate(step, 6, config) for step in range(6)] == pytest.approx(table)


@pytest.mark.parametrize("shape", ["constant", "cosine"])
def test_c6_the_last_tenth_runs_at_a_tenth(shape: str) -> None:
    plain = OptimizerConfig(lr=RATE, warmup_steps=2, lr_schedule=shape, min_lr_ratio=0.5)
    config = plain.model_copy(update={"final_fraction": 0.1, "final_lr_ratio": 0.1})
    for step in range(40):
        expected = learning_rate(step, 40, plain) * (0.1 if step >= 36 else 1.0)
        assert learning_rate(step, 40, config) == pytest.approx(expected, rel=1e-12)


def test_c6_every_path_of_a_unet_has_its_rate() -> None:
    network = build_network(UNET, 0)
    optimizer = make_optimizer(OptimizerConfig(path_lr_ratios=(1.0, 0.5, 0.2), weight_decay=0.1), network)
    set_learning_rate(optimizer, 1e-4)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            path = names.pop(id(parameter)).split(".")[0]
            expected = {"embed": 1e-4, "down": 1e-4, "mid": 5e-5, "up": 2e-5, "head": 2e-5}[path]
            assert group["lr"] == pytest.approx(expected)
    assert not names, "parameters without a group"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_horizons_end_without_an_error(steps: int) -> None:
    config = OptimizerConfig(lr=RATE, warmup_steps=2, min_lr_ratio=FLOOR)
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert all(0 < rate <= RATE for rate in rates)


def test_weight_decay_spares_vectors_and_the_label_table() -> None:
    network = build_network(DIT, 0)
    decayed, plain = make_optimizer(OptimizerConfig(weight_decay=0.3), network).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    spared = {names[id(parameter)] for parameter in plain["params"]}
    assert "embed.label.weight" in spared and "blocks.0.attn.q_norm.weight" in spared
    assert spared == {name for name in names.values() if name.endswith((".bias", "_norm.weight", "label.weight"))}
    assert len(spared) + len(decayed["params"]) == len(names)
