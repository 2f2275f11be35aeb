"""Export: a run or checkpoint to safetensors under another project's names, one shard in memory at a time."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megadiff.checkpoint.conventions import CONVENTIONS, ConventionName
from megadiff.checkpoint.folders import find_checkpoint
from megadiff.checkpoint.index import DTYPES
from megadiff.checkpoint.names import Convention, NameRow, Shapes, parameter_shapes, row_shape
from megadiff.checkpoint.new_folder import new_folder
from megadiff.checkpoint.reader import CheckpointReader
from megadiff.checkpoint.writer import save_tensors, sync_file
from megadiff.config.schema import Config, ModelConfig
from megadiff.errors import CheckpointError
from megadiff.models.dit import sincos_positions

Weights = Literal["ema", "raw"]
ExportDtype = Literal["float32", "bfloat16", "float16"]

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
_KIND_OF: dict[Weights, str] = {"ema": "ema", "raw": "model"}


@dataclass(frozen=True)
class ExportSettings:
    """What to write.

    Attributes:
        convention: whose names.
        weights: the moving average or the weights as trained.
        dtype: of every tensor in the files.
        max_shard_bytes: above this the weights are split over several files with an index; a larger tensor
            has a file of its own.
    """

    convention: ConventionName
    weights: Weights = "ema"
    dtype: ExportDtype = "float32"
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES


def export_weights(source: Path, target: Path, settings: ExportSettings) -> None:
    """Writes the weights of a checkpoint to a new folder.

    Args:
        source: run folder, `checkpoints` folder or checkpoint folder.
        target: the new folder; it appears only when complete.
        settings: names, which weights, dtype and shard size.

    Raises:
        CheckpointError: `target` exists, the checkpoint is damaged or lacks the weights asked for, or the
            convention cannot hold this network without a change of its results.
    """
    with CheckpointReader(find_checkpoint(source)) as reader:
        config = reader.config()
        convention = CONVENTIONS[settings.convention]
        _check_objection(convention, config.model)
        shapes = parameter_shapes(config.model)
        _check_weights(reader, settings.weights, shapes)
        with new_folder(target) as folder:
            reader.verify()
            _Export(reader, config, shapes, convention, settings).write(folder)


def _check_objection(convention: Convention, model: ModelConfig) -> None:
    reason = convention.objection(model)
    if reason is not None:
        others = [
            other.title for other in CONVENTIONS.values() if other is not convention and not other.objection(model)
        ]
        raise CheckpointError(
            f"an export to {convention.title} names would change the results ({reason}); use {' or '.join(others)}"
        )


def _check_weights(reader: CheckpointReader, weights: Weights, shapes: Shapes) -> None:
    kind = _KIND_OF[weights]
    if kind not in reader.kinds():
        remedy = "; use --weights raw" if weights == "ema" else ""
        raise CheckpointError(f"{reader.folder} holds no {weights} weights{remedy}")
    reader.check_shapes(kind, shapes)


class _Export:
    """One export in progress."""

    def __init__(
        self,
        reader: CheckpointReader,
        config: Config,
        shapes: Shapes,
        convention: Convention,
        settings: ExportSettings,
    ) -> None:
        self.reader, self.config, self.shapes = reader, config, shapes
        self.convention, self.settings = convention, settings
        self.dtype = DTYPES[settings.dtype]

    def write(self, folder: Path) -> None:
        """Writes the weights, the index of several files, and config.json where one is expected."""
        rows = self.convention.rows(self.config.model)
        shards = plan_shards([self._num_bytes(row) for row in rows], self.settings.max_shard_bytes)
        names = shard_names(self.convention.stem, len(shards))
        for name, shard in zip(names, shards, strict=True):
            self._write_shard(folder / name, [rows[position] for position in shard])
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(map(self._num_bytes, rows))},
                "weight_map": {
                    rows[position].theirs: name for name, shard in zip(names, shards, strict=True) for position in shard
                },
            }
            _write_json(folder / f"{self.convention.stem}.safetensors.index.json", index)
        content = self.convention.config_json(self.config.model)
        if content is not None:
            _write_json(folder / "config.json", content)

    def _write_shard(self, path: Path, rows: list[NameRow]) -> None:
        """A function of its own, so that a shard's tensors are gone before those of the next are read."""
        save_tensors({row.theirs: self._tensor(row) for row in rows}, path, self._metadata())

    def _num_bytes(self, row: NameRow) -> int:
        return math.prod(row_shape(row, self.shapes, self.config.model)) * self.dtype.itemsize

    def _tensor(self, row: NameRow) -> Tensor:
        """The tensor of a row in the dtype asked for."""
        if not row.ours:
            return position_table(self.config.model).to(self.dtype)
        parts = [self._cast(name) for name in row.ours]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cast(self, name: str) -> Tensor:
        exact = self.reader.read(_KIND_OF[self.settings.weights], name)
        cast = exact.to(self.dtype)
        if self.dtype == torch.float16 and bool((cast.isinf() & exact.isfinite()).any()):
            raise CheckpointError(f"{name} has values beyond the range of float16; use --dtype bfloat16 or float32")
        return cast

    def _metadata(self) -> dict[str, str]:
        return {
            "format": "pt",
            "producer": "megadiff",
            "names": self.convention.title,
            "weights": self.settings.weights,
            "step": str(self.reader.index.step),
            "model": self.config.model.model_dump_json(),
            "diffusion": self.config.diffusion.model_dump_json(),
        }


def position_table(model: ModelConfig) -> Tensor:
    """The fixed positions as facebookresearch/DiT stores them, (1, N, D) float32."""
    return sincos_positions(model.hidden_size, model.input_size // model.patch_size).float().unsqueeze(0)


def plan_shards(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Groups consecutive positions so that each group's sizes sum to at most `limit` or are one."""
    shards: list[list[int]] = []
    filled = 0
    for position, size in enumerate(sizes):
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(position)
        filled += size
    return shards


def shard_names(stem: str, count: int) -> list[str]:
    """Hugging Face's file names: `stem.safetensors`, or `stem-00001-of-00003.safetensors` and so on."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync_file(path)
