"""Saves and restores an engine: every rank its own shards, on any layout.

Restoring needs the network to be the same; the number of processes, the degrees and the ZeRO stage may differ.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megadiff.checkpoint.folders import checkpoint_folder
from megadiff.checkpoint.index import Counters, RankManifest, build_index
from megadiff.checkpoint.names import parameter_shapes
from megadiff.checkpoint.reader import CheckpointReader
from megadiff.checkpoint.retention import prune
from megadiff.checkpoint.writer import Piece, begin_save, pieces_of_range, publish, whole_piece, write_rank_file
from megadiff.config.load import config_to_dict
from megadiff.config.resume import check_resume
from megadiff.dist.agree import gather, on_first, together
from megadiff.engine.engine import Engine
from megadiff.engine.optimizer import state_keys
from megadiff.errors import CheckpointError
from megadiff.parallel.shards import Shard

# Kind and name of the loss statistics per noise level.
_LEVELS = ("levels", "sums")


def save_checkpoint(engine: Engine, root: Path, fingerprint: str, protect: Collection[Path] = ()) -> Path:
    """Writes the engine's state to `root/step_...`; a collective call. Nothing is visible until all of it is on disk.

    Args:
        engine: what to save.
        root: the run's `checkpoints` folder, which all ranks see.
        fingerprint: of the data set, compared on resume.
        protect: checkpoints that retention must not delete.

    Raises:
        CheckpointError: on every rank; former checkpoints are untouched.
    """
    temporary = on_first(lambda: begin_save(root, engine.steps))
    manifests = gather(together(lambda: _write_shards(engine, temporary)))
    final = checkpoint_folder(root, engine.steps)

    def finish() -> None:
        records = [RankManifest.model_validate_json(text) for text in manifests]
        index = build_index(engine.steps, _counters(engine), config_to_dict(engine.run_config), records, fingerprint)
        publish(temporary, final, index)
        prune(root, engine.config.checkpoint.keep_last, protect)

    on_first(finish)
    return final


def _write_shards(engine: Engine, folder: Path) -> str:
    return write_rank_file(folder, dist.get_rank(), _pieces(engine)).model_dump_json()


def _pieces(engine: Engine) -> Iterator[Piece]:
    """What this rank writes: its shards, less those of which another rank holds the same."""
    keys = state_keys(engine.config.optimizer)
    has_state = engine.shards.has_optimizer_state(keys)
    for shard in engine.shards.all:
        if shard.is_copy or shard.numel == 0:
            continue
        values = {"model": shard.master.detach()}
        if engine.ema is not None:
            values["ema"] = engine.ema.values[shard.name]
        if has_state:
            values |= {f"optimizer.{key}": engine.shards.optimizer_state(shard, key) for key in keys}
        for kind, value in values.items():
            yield from pieces_of_range(
                kind, shard.name, tuple(shard.full_shape), shard.offset, shard.size, shard.start, value
            )
    levels = engine.objective.importance.state()
    if levels is not None and dist.get_rank() == 0:  # every rank holds the same
        yield whole_piece(*_LEVELS, levels)


def _counters(engine: Engine) -> Counters:
    counters: Counters = {
        "step": engine.steps,
        "samples": engine.samples,
        "optimizer_steps": engine.steps - engine.skipped_steps,
        "skipped_steps": engine.skipped_steps,
    }
    if engine.ema is not None:
        counters["ema_updates"] = engine.ema.num_updates
    return counters | engine.loss_scale_state()


def load_checkpoint(engine: Engine, folder: Path, fingerprint: str) -> list[str]:
    """Restores an engine from a checkpoint of any layout; a collective call.

    Args:
        engine: freshly built.
        folder: a checkpoint folder.
        fingerprint: of the data set of this run.

    Returns:
        One line for every setting that differs from the checkpoint's and may.

    Raises:
        CheckpointError: damaged, from another network, or without something that this run needs.
        ConfigError: a network, diffusion or data setting differs.
    """
    with CheckpointReader(folder) as reader:
        differences = check_resume(_comparable_config(reader, engine), engine.run_config)
        together(lambda: _restore(engine, reader, fingerprint))
    if engine.layout.zero_stage > 0:
        engine.shards.publish({shard.name: shard.master.detach() for shard in engine.shards.all})
    counters = reader.index.counters
    engine.steps, engine.skipped_steps = int(counters["step"]), int(counters["skipped_steps"])
    engine.samples = int(counters["samples"])
    engine.shards.set_optimizer_steps(int(counters["optimizer_steps"]))
    engine.restore_loss_scale(counters)
    return differences


@torch.no_grad()
def _restore(engine: Engine, reader: CheckpointReader, fingerprint: str) -> None:
    reader.verify(dist.get_rank(), dist.get_world_size())
    reader.check_shapes("model", parameter_shapes(engine.config.model))
    _check_fingerprint(reader, fingerprint)
    keys = state_keys(engine.config.optimizer)
    _check_kinds(engine, reader, keys)
    stepped = reader.index.counters["optimizer_steps"] > 0
    if stepped:
        engine.shards.ensure_optimizer_state(keys)
    for shard in engine.shards.all:
        if shard.numel == 0:
            continue
        shard.master.copy_(_read(reader, "model", shard))
        if engine.ema is not None and "ema" in reader.kinds():
            engine.ema.values[shard.name].copy_(_read(reader, "ema", shard))
        for key in keys if stepped else ():
            engine.shards.optimizer_state(shard, key).copy_(_read(reader, f"optimizer.{key}", shard))
    if engine.ema is not None:
        engine.ema.num_updates = int(reader.index.counters.get("ema_updates", 0))
    if _LEVELS[0] in reader.kinds():
        engine.objective.importance.restore(reader.read(*_LEVELS))
        engine.objective.refresh_weights()


def _read(reader: CheckpointReader, kind: str, shard: Shard) -> torch.Tensor:
    return reader.read_range(kind, shard.name, shard.offset, shard.size, shard.start, shard.stop)


def _check_kinds(engine: Engine, reader: CheckpointReader, keys: tuple[str, ...]) -> None:
    kinds = reader.kinds()
    if engine.ema is not None and "ema" not in kinds:
        raise CheckpointError(
            f"{reader.folder} holds no moving average but ema.enabled is true; set --ema.enabled false to go on "
            "without one"
        )
    missing = [key for key in keys if f"optimizer.{key}" not in kinds]
    if missing and reader.index.counters["optimizer_steps"] > 0:
        raise CheckpointError(
            f"{reader.folder} holds no optimizer state {', '.join(missing)}, which optimizer.name = "
            f"{engine.config.optimizer.name} needs; resume with the optimizer that the run was trained with"
        )


def _comparable_config(reader: CheckpointReader, engine: Engine) -> dict[str, Any]:
    """The checkpoint's settings; imported weights were trained on no data of ours, so any data may follow."""
    stored = dict(reader.index.config)
    if reader.index.counters["samples"] == 0:
        stored["data"] = config_to_dict(engine.run_config)["data"]
    return stored


def _check_fingerprint(reader: CheckpointReader, fingerprint: str) -> None:
    stored = reader.index.data_fingerprint
    if stored and stored != fingerprint:
        raise CheckpointError(
            f"{reader.folder} was trained on other data (fingerprint {stored[:12]}, now {fingerprint[:12]}); point "
            "data.path at the same data or start a new --run-dir"
        )
