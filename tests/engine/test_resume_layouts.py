"""B22: a checkpoint of any layout continues on any other one, as if nothing had happened."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.engine.layout_jobs import (
    NEXT_STEPS,
    SAVED_STEPS,
    RankState,
    load_and_go_on,
    odd_config,
    save_and_go_on,
)
from tests.engine.runs import RUN_SECONDS, checkpoint, stored
from tests.parity.layouts import Layout
from tests.parity.networks import GLOBAL_BATCH
from tests.parity.outcome import assemble, relative
from tests.pool import WorkerPool

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("1 process", 1),
        Layout("dp2 zero1", 2, {"zero_stage": 1}),
        Layout("dp2 zero2", 2, {"zero_stage": 2}),
        Layout("dp2 zero3", 2, {"zero_stage": 3}),
        Layout("tp2", 2, {"tensor": 2}),
        Layout("pp2", 2, {"pipeline": 2}),
        Layout("pp2 folded", 2, {"pipeline": 2, "accumulation": 4, "schedule": "folded"}),
        Layout("tp2 x pp2 folded", 4, {"tensor": 2, "pipeline": 2, "accumulation": 4, "schedule": "folded"}),
        Layout("tp2+sp x pp2", 4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    )
}
FAST_PAIRS = (
    ("dp2 zero1", "1 process"),
    ("1 process", "dp2 zero2"),
    ("tp2", "pp2"),
    ("dp2 zero3", "tp2"),
    ("pp2", "dp2 zero1"),
)
UNET_PAIRS = (("pp2 folded", "tp2"), ("dp2 zero1", "tp2 x pp2 folded"), ("tp2 x pp2 folded", "1 process"))
# The uneven DiT has too few layers for more folded stages than one layer each.
DIT_LAYOUTS = [name for name in LAYOUTS if "folded" not in name]
EXACT = [name for name in DIT_LAYOUTS if "zero_stage" not in LAYOUTS[name].settings]
# float64 differs by the order of additions only; ZeRO's master weights are float32.
LIMITS = {"fp32": 1e-5, "fp64": 1e-10}
COUNTERS = (SAVED_STEPS, SAVED_STEPS * GLOBAL_BATCH, 0, SAVED_STEPS)


def covering_pairs(names: list[str]) -> list[tuple[str, str]]:
    """Every layout from and to one process, and from and to a neighbour, so that no layout meets only the simple one.

    A checkpoint holds boxes of global tensors, not a word of its layout: what a layout writes and how one reads are
    tested apart, and more pairs would repeat both.
    """
    single, *others = names
    neighbours = list(zip(others, [*others[1:], others[0]], strict=True))
    return [pair for name in others for pair in ((single, name), (name, single))] + neighbours


Saved = dict[tuple[str, ...], tuple[Path, list[RankState]]]


@pytest.fixture(scope="module")
def saved() -> Saved:
    """The uninterrupted runs that were trained so far, by layout and precision."""
    return {}


def uninterrupted(
    pools: Mapping[int, WorkerPool],
    saved: Saved,
    factory: pytest.TempPathFactory,
    name: str,
    precision: str,
    optimizer: str = "adamw",
    network: str = "DiT",
) -> tuple[Path, list[RankState]]:
    """The checkpoint that a layout wrote, and how that run went on."""
    key = (name, precision, optimizer, network)
    if key not in saved:
        layout, run_dir = LAYOUTS[name], factory.mktemp("run")
        config = odd_config(precision, optimizer, network, **layout.settings)
        root = run_dir / "checkpoints"
        states = pools[layout.world_size].run(save_and_go_on, RUN_SECONDS, config=config, root=root)
        saved[key] = (checkpoint(run_dir, SAVED_STEPS), states)
    return saved[key]


def check(
    pools: Mapping[int, WorkerPool],
    saved: Saved,
    factory: pytest.TempPathFactory,
    source: str,
    target: str,
    precision: str,
    optimizers: tuple[str, str] = ("adamw", "adamw"),
    network: str = "DiT",
) -> None:
    """Saves on one layout with the first optimizer, loads on the other with the second."""
    folder, before = uninterrupted(pools, saved, factory, source, precision, optimizers[0], network)
    layout = LAYOUTS[target]
    config = odd_config(precision, optimizers[1], network, **layout.settings)
    after = pools[layout.world_size].run(load_and_go_on, RUN_SECONDS, config=config, folder=folder)
    expected, on_disk, found = whole(before), stored(folder), whole(after)
    assert expected.keys() == on_disk.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(on_disk[name], value), f"{name} was not saved as it was"
        assert torch.equal(found[name], value), f"{name} was not loaded as it was saved"
    for state in before + after:
        assert state.counters == COUNTERS
        assert state.optimizer_steps <= {float(SAVED_STEPS)}
        assert len(state.losses) == NEXT_STEPS
        assert relative(state.losses, before[0].losses) < LIMITS[precision]


def whole(states: list[RankState]) -> dict[str, torch.Tensor]:
    """Every tensor put together from the parts of all ranks, by `kind/name`."""
    return {
        f"{kind}/{name}": value
        for kind in states[0].pieces
        for name, value in assemble([piece for state in states for piece in state.pieces[kind]]).items()
    }


@pytest.mark.parametrize(("source", "target"), FAST_PAIRS)
def test_b22_some_pairs(
    pools: Mapping[int, WorkerPool],
    saved: Saved,
    tmp_path_factory: pytest.TempPathFactory,
    source: str,
    target: str,
) -> None:
    check(pools, saved, tmp_path_factory, source, target, "fp32")


@pytest.mark.parametrize(("source", "target"), UNET_PAIRS)
def test_b22_unet_pairs(
    pools: Mapping[int, WorkerPool],
    saved: Saved,
    tmp_path_factory: pytest.TempPathFactory,
    source: str,
    target: str,
) -> None:
    check(pools, saved, tmp_path_factory, source, target, "fp32", network="UNet")


@pytest.mark.parametrize(
    ("source", "target", "optimizers"),
    [
        ("dp2 zero1", "tp2", ("adamw", "adamw_ema")),
        ("dp2 zero3", "1 process", ("adamw_ema", "adamw")),
        ("tp2", "dp2 zero2", ("adamw_ema", "adamw_ema")),
    ],
)
def test_b22_adamw_and_adamw_ema_continue_each_other(
    pools: Mapping[int, WorkerPool],
    saved: Saved,
    tmp_path_factory: pytest.TempPathFactory,
    source: str,
    target: str,
    optimizers: tuple[str, str],
) -> None:
    check(pools, saved, tmp_path_factory, source, target, "fp32", optimizers)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [pair for pair in covering_pairs(DIT_LAYOUTS) if pair not in FAST_PAIRS])
def test_b22_every_layout_as_source_and_target(
    pools: Mapping[int, WorkerPool],
    saved: Saved,
    tmp_path_factory: pytest.TempPathFactory,
    source: str,
    target: str,
) -> None:
    check(pools, saved, tmp_path_factory, source, target, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), covering_pairs(EXACT))
def test_b22_every_exact_layout_in_float64(
    pools: Mapping[int, WorkerPool],
    saved: Saved,
    tmp_path_factory: pytest.TempPathFactory,
    source: str,
    target: str,
) -> None:
    check(pools, saved, tmp_path_factory, source, target, "fp64")


def test_the_network_has_sizes_that_two_ranks_cannot_share(
    pools: Mapping[int, WorkerPool], saved: Saved, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Otherwise the pairs above would prove nothing about padding and uneven ranges."""
    folder, states = uninterrupted(pools, saved, tmp_path_factory, "dp2 zero1", "fp32")
    sizes = {value.numel() for name, value in stored(folder).items() if name.startswith("model/")}
    assert any(size % 2 for size in sizes)
    shares = [sum(p.values.numel() for p in state.pieces["model"]) for state in states]
    assert all(0 < share < sum(shares) for share in shares)
    ranges = [p for state in states for p in state.pieces["model"]]
    is_cut = [piece.values.numel() < torch.Size(piece.size).numel() for piece in ranges]
    assert any(is_cut), "every tensor lies whole on one rank"
