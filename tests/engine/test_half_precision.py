"""bf16 and fp16: the network computes in half precision, masters and moving average stay float32."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.engine.half_jobs import OVERFLOW_STEP, HalfReport, load_and_step, overflow_and_save, train_half
from tests.engine.layout_jobs import load_and_go_on
from tests.engine.runs import RUN_SECONDS, checkpoint, checkpoints, run, stored, tiny_config
from tests.parity.networks import parity_config
from tests.parity.outcome import assemble, relative
from tests.pool import WorkerPool

Pools = Mapping[int, WorkerPool]
LAYOUTS = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "pp2": {"pipeline": 2, "zero_stage": 1},
    "tp2": {"tensor": 2, "zero_stage": 1},
}
# Also with the optimizer that averages: DeepSpeed wraps it for bf16 differently at ZeRO 1 and above.
ONE_PASS = ("zero1", "zero3", "pp2")
# bf16 rounds to 2**-9 = 0.2 %; rounding errors of the 192 elements of 8 samples average out in the loss.
BF16_LIMIT = 0.01
INITIAL_SCALE = 2.0**16


@pytest.fixture(scope="module")
def float32(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> HalfReport:
    """One process in float32."""
    root = tmp_path_factory.mktemp("float32")
    (report,) = pools[1].run(train_half, RUN_SECONDS, config=parity_config(), root=root)
    return report


@pytest.mark.parametrize(
    ("name", "optimizer"), [(name, "adamw") for name in LAYOUTS] + [(name, "adamw_ema") for name in ONE_PASS]
)
def test_bf16_trains_as_float32_does_and_loads_what_it_saved(
    pools: Pools, tmp_path: Path, float32: HalfReport, name: str, optimizer: str
) -> None:
    config = parity_config(precision="bf16", optimizer=optimizer, **LAYOUTS[name])
    reports = pools[2].run(train_half, RUN_SECONDS, config=config, root=tmp_path / "checkpoints")
    for report in reports:
        assert report.network == {torch.bfloat16}
        assert report.masters == report.averages == {torch.float32}
        assert report.losses == reports[0].losses
        assert 0 < relative(report.losses, float32.losses) < BF16_LIMIT
    (saved,) = [path for path in checkpoints(tmp_path) if path != "latest"]
    folder = tmp_path / "checkpoints" / saved
    states = pools[2].run(load_and_go_on, RUN_SECONDS, config=config, folder=folder)
    on_disk = stored(folder)
    for kind in states[0].pieces:
        before = assemble([piece for report in reports for piece in report.state.pieces[kind]])
        after = assemble([piece for state in states for piece in state.pieces[kind]])
        assert before.keys() == after.keys()
        for parameter, value in before.items():
            assert value.dtype == torch.float32
            assert torch.equal(after[parameter], value) and torch.equal(on_disk[f"{kind}/{parameter}"], value)
            # Otherwise float32 would only be the name of the dtype.
            assert kind not in ("model", "ema") or not torch.equal(value, value.bfloat16().float()), parameter
    assert [state.losses for state in states] == [report.state.losses for report in reports]


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_is_refused_on_cpu(pools: Pools, tmp_path: Path, world_size: int) -> None:
    error = run(pools[world_size], tiny_config(train__precision="fp16", parallel__zero_stage=1), tmp_path).error
    assert error == "ConfigError: train.precision = fp16 does not exist on CPU; use fp32 or bf16"


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_ema"])
def test_fp16_skips_the_step_that_overflows_and_keeps_its_scale(pools: Pools, tmp_path: Path, optimizer: str) -> None:
    config = parity_config(precision="fp16", zero_stage=1, optimizer=optimizer)
    arguments = {"config": config, "root": tmp_path / "checkpoints", "num_steps": 5}
    reports = pools[2].run(overflow_and_save, RUN_SECONDS, **arguments)
    for report in reports:
        assert report.network == {torch.float16} and report.first_scale == INITIAL_SCALE
        for number, step in enumerate(report.steps):
            is_good = number != OVERFLOW_STEP
            assert step.applied == step.changed_masters == step.changed_average == is_good, (number, step)
            assert step.scale == (INITIAL_SCALE if number < OVERFLOW_STEP else INITIAL_SCALE / 2)
        assert [step.ema_updates for step in report.steps] == [1, 2, 2, 3, 4]
        assert report.skipped_steps == 1
    folder = checkpoint(tmp_path, 4)
    for before, after in zip(
        reports, pools[2].run(load_and_step, RUN_SECONDS, config=config, folder=folder), strict=True
    ):
        assert after.first_scale == INITIAL_SCALE / 2
        assert after.steps == before.steps[-1:]
        assert (after.scale_state, after.skipped_steps) == (before.scale_state, 1)
