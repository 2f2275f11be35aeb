"""A run with features in its loss is the same on every kind of layout; only stages with the loss see pictures."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from megadiff.config.schema import Config
from tests.diffusion.weights import save_vgg
from tests.parity.jobs import combine, train
from tests.parity.layouts import Layout
from tests.parity.networks import DIT, UNET, changed, parity_config
from tests.parity.outcome import Outcome, differences
from tests.parity.reference import train_reference
from tests.parity.report import Matrix
from tests.pool import WorkerPool

NETWORKS = {"DiT": DIT, "UNet": UNET}
# In float64 where it can be: the gradient of an L1 loss jumps where a difference of features changes its sign, which
# rounding of float32 does in later steps.
CELLS = (
    ("DiT", Layout("dp2 x pp2", 4, {"pipeline": 2, "precision": "fp64"})),
    ("DiT", Layout("zero3", 2, {"zero_stage": 3})),
    ("UNet", Layout("tp2 x pp2 folded", 4, {"tensor": 2, "pipeline": 2, "accumulation": 4, "precision": "fp64"})),
)
LIMITS = {"fp32": 1e-5, "fp64": 1e-10}


@pytest.fixture(scope="module")
def vgg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vgg(tmp_path_factory.mktemp("weights") / "vgg.pth")


def config_of(network: str, vgg: Path, layout: Mapping[str, object]) -> Config:
    """The hybrid loss with Gram matrices, and importance, which weighs both terms."""
    diffusion = {
        "perceptual_weight": 0.3,
        "gram_weight": 0.5,
        "vgg_path": str(vgg),
        "perceptual_min_snr": 0.1,
        "timestep_sampling": "logit_normal",
    }
    return changed(parity_config(model=NETWORKS[network], **layout), diffusion=diffusion)


@cache
def reference(network: str, vgg: Path, precision: str) -> Outcome:
    return train_reference(config_of(network, vgg, {"precision": precision}), 3)


@pytest.mark.parametrize(("network", "layout"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_a11_a12_training_equals_one_process(
    pools: Mapping[int, WorkerPool], parity_matrix: Matrix, vgg: Path, network: str, layout: Layout
) -> None:
    precision = layout.settings.get("precision", "fp32")
    config = config_of(network, vgg, layout.settings)
    found = combine(pools[layout.world_size].run(train, config=config, num_steps=3))
    measured = differences(found, reference(network, vgg, precision))
    parity_matrix.record(network, f"{layout.name}, features", precision, measured)
    assert all(value < LIMITS[precision] for value, _ in measured.values()), measured
