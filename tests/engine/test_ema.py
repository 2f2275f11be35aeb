"""B14, B15, B16: the moving average follows its closed form, one update an applied step, in full precision."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megadiff.config.layout import resolve_layout
from megadiff.config.schema import Config, EmaConfig
from megadiff.engine.build import build_engine
from megadiff.engine.ema import Ema, ema_decay
from megadiff.parallel.shards import Shard
from tests.parity.jobs import pieces_of, ready_engine, this_process, train_one_step
from tests.parity.networks import changed, parity_config
from tests.parity.outcome import Piece, assemble
from tests.pool import WorkerPool


@dataclass(frozen=True)
class OneShard:
    """The shards of a rank that owns one parameter."""

    all: list[Shard]
    optimizer: torch.optim.Optimizer | None = None


def shards_of(master: Tensor, parameter: Tensor | None = None) -> OneShard:
    """One parameter; the network computes with `parameter`, the optimizer steps `master`."""
    shape = tuple(master.shape)
    held = nn.Parameter(master if parameter is None else parameter)
    shard = Shard("w", held, master.shape, (0,), shape, 0, master.numel(), master, master, 0, False)
    return OneShard([shard])


def run_path(config: EmaConfig, path: Tensor) -> tuple[Ema, float]:
    """The average after a weight took the values of `path`, the first of which it starts from."""
    master = path[:1].clone()
    ema = Ema(config, shards_of(master))
    for weight in path[1:]:
        master.fill_(weight)
        ema.update()
    return ema, ema.values["w"].item()


@pytest.mark.parametrize("num_steps", [1, 10, 1000])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.9999])
def test_b14_a_known_path_follows_the_closed_form(num_steps: int, decay: float) -> None:
    path = torch.linspace(-1, 2, num_steps + 1, dtype=torch.float64).sin()
    powers = decay ** torch.arange(num_steps - 1, -1, -1, dtype=torch.float64)
    expected = decay**num_steps * path[0] + (1 - decay) * (powers * path[1:]).sum()
    ema, found = run_path(EmaConfig(decay=decay, warmup=False), path)
    assert found == pytest.approx(expected.item(), abs=1e-12)
    assert ema.num_updates == num_steps


def test_b14_warm_up_follows_its_table_and_leaves_the_setting_alone() -> None:
    config = EmaConfig(decay=0.99, warmup=True)
    table = {0: 0.1, 1: 2 / 11, 2: 3 / 12, 90: 0.91, 889: 890 / 899, 891: 0.99, 10**6: 0.99}
    assert {n: ema_decay(n, config) for n in table} == pytest.approx(table)
    assert ema_decay(0, EmaConfig(decay=0.99, warmup=False)) == 0.99
    path = torch.linspace(0, 1, 8, dtype=torch.float64)
    expected = path[0].item()
    for n, weight in enumerate(path[1:].tolist()):
        expected += (1 - (1 + n) / (10 + n)) * (weight - expected)
    ema, found = run_path(config, path)
    assert found == pytest.approx(expected, abs=1e-14)
    assert ema.config.decay == 0.99


def test_b14_constant_weights_are_reached() -> None:
    path = torch.full((2001,), 3.0, dtype=torch.float64)
    path[0] = -5.0
    assert run_path(EmaConfig(decay=0.99, warmup=False), path)[1] == pytest.approx(3.0, abs=1e-7)


def test_b16_the_average_of_half_precision_weights_moves() -> None:
    """Shadow 1.0, weight 1.01, decay 0.9999: bfloat16 would stay at 1.0 for ever."""
    master = torch.tensor([1.0])
    ema = Ema(EmaConfig(decay=0.9999, warmup=False), shards_of(master, master.to(torch.bfloat16)))
    master.fill_(1.01)
    for _ in range(2000):
        ema.update()
    assert ema.values["w"].dtype == torch.float32
    assert ema.values["w"].item() == pytest.approx(1 + 0.01 * (1 - 0.9999**2000), abs=2e-5)


def train_and_average(config: Config, skip: tuple[int, ...], num_steps: int) -> tuple[int, int, list[Piece]]:
    """Trains; the steps in `skip` report an overflow. Returns updates, skips and the average."""
    engine = ready_engine(config)
    assert all(value.dtype == torch.float32 for value in engine.ema.values.values())
    for step in range(num_steps):
        engine.deepspeed.was_step_applied = lambda step=step: step not in skip
        train_one_step(engine, step)
    return (
        engine.ema.num_updates,
        engine.skipped_steps,
        pieces_of(engine, lambda shard: engine.ema.values[shard.name]),
    )


def test_b15_one_update_an_applied_step(pools: Mapping[int, WorkerPool]) -> None:
    """12 micro-batches, accumulation 4, one step that overflowed: two updates."""
    config = changed(parity_config(accumulation=4), ema={"decay": 0.5, "warmup": False})
    ((updates, skipped, average),) = pools[1].run(train_and_average, config=config, skip=(1,), num_steps=3)
    assert (updates, skipped) == (2, 1)
    whole = changed(config, train={"gradient_accumulation_steps": 1})
    ((_, _, expected),) = pools[1].run(train_and_average, config=whole, skip=(1,), num_steps=3)
    for found, right in zip(average, expected, strict=True):
        assert (found.values - right.values).abs().max() < 1e-5


def test_b16_the_average_under_bfloat16_comes_from_the_masters(pools: Mapping[int, WorkerPool]) -> None:
    config = changed(parity_config(zero_stage=1, precision="bf16"), ema={"decay": 0.0, "warmup": False})
    reports = pools[2].run(train_and_average, config=config, skip=(), num_steps=2)
    average = assemble([piece for report in reports for piece in report[2]])
    matrix = average["blocks.0.attn.q.weight"]
    assert matrix.dtype == torch.float32
    assert not torch.equal(matrix, matrix.to(torch.bfloat16).float()), "these are rounded weights"


@pytest.mark.parametrize(
    ("zero_stage", "options"),
    [
        (1, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"sub_group_size": 3000}),  # several flat tensors for a parameter group, stepped one by one
        (3, {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 3000}),
    ],
)
def test_adamw_ema_averages_whatever_flats_deepspeed_makes(
    pools: Mapping[int, WorkerPool], zero_stage: int, options: dict[str, object]
) -> None:
    averages = []
    for optimizer in ("adamw", "adamw_ema"):
        config = parity_config(zero_stage=zero_stage, optimizer=optimizer)
        config = config.model_copy(update={"deepspeed": {"zero_optimization": options}})
        reports = pools[2].run(train_and_average, config=config, skip=(), num_steps=3)
        assert {(updates, skipped) for updates, skipped, _ in reports} == {(3, 0)}
        averages.append(assemble([piece for report in reports for piece in report[2]]))
    for name, expected in averages[0].items():
        assert (averages[1][name] - expected).abs().max() < 1e-6, name


def test_adamw_ema_without_an_average(pools: Mapping[int, WorkerPool]) -> None:
    settings = {"ema": {"enabled": False, "decay": EmaConfig().decay}}
    losses = [
        pools[2].run(losses_of, config=changed(parity_config(zero_stage=1, optimizer=optimizer), **settings))
        for optimizer in ("adamw", "adamw_ema")
    ]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)


def losses_of(config: Config) -> list[float]:
    """Three steps from the initial weights, without a moving average."""
    process = this_process()
    engine = build_engine(config, resolve_layout(config, process.world_size), process)
    assert engine.ema is None
    return [float(train_one_step(engine, step).loss) for step in range(3)]
