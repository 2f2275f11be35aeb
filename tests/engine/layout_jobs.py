"""What the processes of the pool run to save on one layout and load on another."""

from dataclasses import dataclass
from pathlib import Path

from megadiff.config.schema import Config, ModelConfig, OptimizerConfig
from megadiff.engine.checkpointing import load_checkpoint, save_checkpoint
from megadiff.engine.engine import Engine
from megadiff.engine.optimizer import state_keys
from tests.parity.jobs import pieces_of, ready_engine, train_one_step
from tests.parity.networks import UNET, parity_config
from tests.parity.outcome import Piece

# Rows, heads, hidden features and channels that two ranks cannot share evenly where the plan has a choice.
ODD_DIT = ModelConfig(
    hidden_size=36,
    num_heads=4,
    num_layers=3,
    input_size=4,
    patch_size=1,
    mlp_ratio=1.5,
    num_classes=8,
    qk_norm=True,
)
NETWORKS = {"DiT": ODD_DIT, "UNet": UNET}
ADAMW = OptimizerConfig(lr=2e-3, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1, clip_norm=1.0, warmup_steps=5)
SAVED_STEPS, NEXT_STEPS = 3, 5
FINGERPRINT = "the same data"


@dataclass(frozen=True)
class RankState:
    """One rank's part of an engine's state, by kind, and the losses of the steps that followed."""

    pieces: dict[str, list[Piece]]
    losses: list[float]
    counters: tuple[int, int, int, int]
    optimizer_steps: set[float]


def odd_config(precision: str, optimizer: str = "adamw", network: str = "DiT", **layout: object) -> Config:
    """A tiny network, a DiT of uneven sizes unless another is named, on a layout."""
    config = parity_config(model=NETWORKS[network], precision=precision, **layout)
    return config.model_copy(update={"optimizer": ADAMW.model_copy(update={"name": optimizer})})


def save_and_go_on(config: Config, root: Path) -> RankState:
    """Trains, saves, trains on: the uninterrupted run."""
    engine = ready_engine(config)
    for step in range(SAVED_STEPS):
        train_one_step(engine, step)
    save_checkpoint(engine, root, FINGERPRINT)
    return go_on(engine)


def load_and_go_on(config: Config, folder: Path) -> RankState:
    """Loads into a new engine, which starts from other values, and trains on."""
    engine = ready_engine(config)
    load_checkpoint(engine, folder, FINGERPRINT)
    return go_on(engine)


def go_on(engine: Engine) -> RankState:
    """The engine's state as it is, and the losses of some more steps."""
    keys, shards = state_keys(engine.config.optimizer), engine.shards
    pieces = {
        "model": pieces_of(engine, lambda shard: shard.master),
        "ema": pieces_of(engine, lambda shard: engine.ema.values[shard.name]),
    }
    for key in keys:
        pieces[f"optimizer.{key}"] = pieces_of(engine, lambda shard, key=key: shards.optimizer_state(shard, key))
    counters = (engine.steps, engine.samples, engine.skipped_steps, engine.ema.num_updates)
    steps = {float(state["step"]) for state in shards.optimizer.state.values()}
    losses = [float(train_one_step(engine, SAVED_STEPS + step).loss) for step in range(NEXT_STEPS)]
    return RankState(pieces, losses, counters, steps)
