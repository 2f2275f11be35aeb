"""Loss, every named gradient, norm, weights, moving average, predictions: on every layout as on one process.

The reference is plain PyTorch. float32 differs by the order of additions, a few times 1e-7 relative to the largest
value; float64 by a few times 1e-16. The limits are those of the issue that asked for the layouts.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from tests.parity.jobs import combine, train
from tests.parity.layouts import EXACT_LAYOUTS, LAYOUTS, Layout, product
from tests.parity.networks import parity_config
from tests.parity.outcome import Outcome, differences
from tests.parity.reference import train_reference
from tests.parity.report import Matrix
from tests.pool import WorkerPool

NUM_STEPS = 5
LIMITS = {"fp32": 1e-5, "fp64": 1e-10}


@cache
def reference(optimizer: str, precision: str) -> Outcome:
    """What one process gives; for `adamw_ema` that is torch's AdamW and an average of its own."""
    optimizer = "adamw" if optimizer == "adamw_ema" else optimizer
    return train_reference(parity_config(optimizer=optimizer, precision=precision), NUM_STEPS)


def check(
    pools: Mapping[int, WorkerPool],
    matrix: Matrix,
    layout: Layout,
    optimizer: str = "adamw",
    precision: str = "fp32",
    limit_seconds: float = 120,
) -> None:
    """Trains on a layout and compares everything with one process."""
    config = parity_config(optimizer=optimizer, precision=precision, **layout.settings)
    reports = pools[layout.world_size].run(train, limit_seconds, config=config, num_steps=NUM_STEPS)
    expected = reference(optimizer, precision)
    found = combine(reports)
    assert found.rates == expected.rates
    measured = differences(found, expected)
    row = layout.name if optimizer != "adamw_ema" else f"{layout.name}, adamw_ema"
    matrix.record("DiT", row, precision, measured)
    assert all(difference < LIMITS[precision] for difference, _ in measured.values()), measured


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_equals_one_process(
    pools: Mapping[int, WorkerPool], parity_matrix: Matrix, layout: Layout, optimizer: str
) -> None:
    check(pools, parity_matrix, layout, optimizer)


def layouts_of_the_averaging_optimizer() -> list[Any]:
    """All layouts; those that only combine others are slow."""
    simple = ("1 process", "dp2", "tp2", "pp2", "zero1", "zero2", "zero3")
    return [layout if layout.name in simple else pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS]


@pytest.mark.parametrize("layout", layouts_of_the_averaging_optimizer(), ids=lambda layout: layout.name)
def test_training_with_adamw_ema_equals_adamw_on_one_process(
    pools: Mapping[int, WorkerPool], parity_matrix: Matrix, layout: Layout
) -> None:
    check(pools, parity_matrix, layout, "adamw_ema")


@pytest.mark.parametrize("layout", EXACT_LAYOUTS, ids=lambda layout: layout.name)
def test_training_equals_one_process_in_float64(
    pools: Mapping[int, WorkerPool], parity_matrix: Matrix, layout: Layout
) -> None:
    check(pools, parity_matrix, layout, precision="fp64")


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(product()), ids=lambda layout: layout.name)
def test_training_equals_one_process_on_every_combination(
    pools: Mapping[int, WorkerPool], parity_matrix: Matrix, layout: Layout
) -> None:
    check(pools, parity_matrix, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout("compiled", 1, {"compile": True}),
        Layout("tp2+sp, compiled", 2, {"tensor": 2, "sequence_parallel": True, "compile": True}),
        Layout("pp2, compiled", 2, {"pipeline": 2, "compile": True}),
    ],
    ids=lambda layout: layout.name,
)
def test_compiled_training_equals_one_process(
    pools: Mapping[int, WorkerPool], parity_matrix: Matrix, layout: Layout
) -> None:
    check(pools, parity_matrix, layout, limit_seconds=400)


def test_every_gradient_of_the_reference_counts() -> None:
    """The comparison would be empty if adaLN-zero's zeros made the gradients vanish."""
    gradients = reference("adamw", "fp64").gradients
    largest = max(gradient.abs().max() for gradient in gradients.values())
    assert len(gradients) == 4 * 16 + 11
    assert all(gradient.abs().max() > 1e-3 * largest for gradient in gradients.values())
    assert reference("adamw", "fp64").norms[0] > 1.0  # the limit of clipping: it is at work
