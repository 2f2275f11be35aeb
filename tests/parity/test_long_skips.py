"""UNets and the U-shaped DiT: as on one process, on every layout and with either pipeline schedule.

float32 differs by the order of additions, float64 by a few times 1e-16; the limits are those of the issue.
"""

from collections.abc import Mapping
from functools import cache

import pytest

from tests.parity.jobs import combine, train
from tests.parity.layouts import Layout
from tests.parity.networks import OPTIONS_UNET, TEXT_UNET, UDIT, UNET, parity_config
from tests.parity.outcome import Outcome, differences
from tests.parity.reference import train_reference
from tests.parity.report import Matrix
from tests.pool import WorkerPool

NUM_STEPS = 3
LIMITS = {"fp32": 1e-5, "fp64": 1e-10}
# A prediction after some steps also holds the differences of the weights, which a UNet of random values makes larger.
PREDICTION_LIMITS = {"fp32": 1e-4, "fp64": 1e-10}
NETWORKS = {"UNet": UNET, "text UNet": TEXT_UNET, "UNet with options": OPTIONS_UNET, "U-shaped DiT": UDIT}

OPEN = {"pipeline": 2, "schedule": "1f1b"}
FOLDED = {"pipeline": 2, "accumulation": 4}
LAYOUTS = {
    "1 process": Layout("1 process", 1),
    "tp2": Layout("tp2", 2, {"tensor": 2}),
    "tp2+sp": Layout("tp2+sp", 2, {"tensor": 2, "sequence_parallel": True}),
    "zero1": Layout("zero1", 2, {"zero_stage": 1}),
    "zero3": Layout("zero3", 2, {"zero_stage": 3}),
    "full": Layout("full checkpointing", 1, {"recompute": "full"}),
    "pp2": Layout("pp2 1f1b", 2, OPEN),
    "pp2 folded": Layout("pp2 folded", 2, FOLDED),
    "pp2 folded full": Layout("pp2 folded, full checkpointing", 2, {**FOLDED, "recompute": "full"}),
    "pp2 folded selective": Layout("pp2 folded, selective checkpointing", 2, {**FOLDED, "recompute": "selective"}),
    "pp4": Layout("pp4 1f1b", 4, {"pipeline": 4, "schedule": "1f1b", "accumulation": 4}),
    "pp4 folded": Layout("pp4 folded", 4, {"pipeline": 4, "accumulation": 8}),
    "tp2 x pp2": Layout("tp2 x pp2 1f1b", 4, {**OPEN, "tensor": 2}),
    "tp2 x pp2 folded": Layout("tp2 x pp2 folded", 4, {**FOLDED, "tensor": 2}),
    "tp2+sp x pp2": Layout("tp2+sp x pp2 1f1b", 4, {**OPEN, "tensor": 2, "sequence_parallel": True}),
    "tp2+sp x pp2 folded": Layout("tp2+sp x pp2 folded", 4, {**FOLDED, "tensor": 2, "sequence_parallel": True}),
    "dp2 x pp2 folded": Layout("dp2 x pp2 folded", 4, FOLDED),
    "zero1 x pp2 folded": Layout("zero1 x pp2 folded", 4, {**FOLDED, "zero_stage": 1}),
}
EVERYWHERE = ("tp2", "pp2", "pp2 folded", "pp4 folded", "tp2 x pp2 folded")
CELLS = {
    "UNet": tuple(name for name in LAYOUTS if "sp" not in name),
    "text UNet": ("1 process", *EVERYWHERE, "tp2+sp", "tp2+sp x pp2 folded", "pp2 folded full"),
    "UNet with options": ("1 process", *EVERYWHERE, "pp2 folded selective"),
    "U-shaped DiT": ("1 process", *EVERYWHERE, "tp2+sp", "tp2+sp x pp2", "tp2+sp x pp2 folded", "pp2 folded full"),
}
EXACT_CELLS = {
    "UNet": EVERYWHERE,
    "text UNet": ("tp2 x pp2 folded",),
    "UNet with options": ("tp2 x pp2 folded",),
    "U-shaped DiT": EVERYWHERE,
}


@cache
def reference(network: str, precision: str) -> Outcome:
    """What one process gives."""
    return train_reference(parity_config(precision=precision, model=NETWORKS[network]), NUM_STEPS)


def check(pools: Mapping[int, WorkerPool], matrix: Matrix, network: str, layout: Layout, precision: str) -> None:
    """Trains on a layout and compares everything with one process."""
    config = parity_config(precision=precision, model=NETWORKS[network], **layout.settings)
    reports = pools[layout.world_size].run(train, 120, config=config, num_steps=NUM_STEPS)
    measured = differences(combine(reports), reference(network, precision))
    matrix.record(network, layout.name, precision, measured)
    for what, (difference, name) in measured.items():
        limits = PREDICTION_LIMITS if what.startswith("predict") else LIMITS
        assert difference < limits[precision], (what, name)


@pytest.mark.parametrize(("network", "layout"), [(n, layout) for n, cells in CELLS.items() for layout in cells])
def test_training_equals_one_process(
    pools: Mapping[int, WorkerPool], parity_matrix: Matrix, network: str, layout: str
) -> None:
    check(pools, parity_matrix, network, LAYOUTS[layout], "fp32")


@pytest.mark.parametrize(("network", "layout"), [(n, layout) for n, cells in EXACT_CELLS.items() for layout in cells])
def test_training_equals_one_process_in_float64(
    pools: Mapping[int, WorkerPool], parity_matrix: Matrix, network: str, layout: str
) -> None:
    check(pools, parity_matrix, network, LAYOUTS[layout], "fp64")


@pytest.mark.parametrize("network", NETWORKS)
def test_every_gradient_of_the_reference_counts(network: str) -> None:
    """The comparison would be empty where gradients vanish, as they must for what is added to all keys alike."""
    gradients = reference(network, "fp64").gradients
    largest = max(gradient.abs().max() for gradient in gradients.values())
    small = [name for name, gradient in gradients.items() if not gradient.abs().max() > 1e-4 * largest]
    assert all(name.endswith(".k.bias") for name in small)
