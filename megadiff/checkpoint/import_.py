"""Import: weights under another project's names to a new run folder, to be sampled or trained further."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from megadiff.checkpoint.conventions import CONVENTIONS, ConventionName
from megadiff.checkpoint.export import DEFAULT_MAX_SHARD_BYTES, plan_shards, position_table
from megadiff.checkpoint.folders import CHECKPOINTS, checkpoint_folder
from megadiff.checkpoint.index import Counters, RankManifest, build_index
from megadiff.checkpoint.names import Convention, NameRow, Origin, Shapes, parameter_shapes, row_shape
from megadiff.checkpoint.new_folder import new_folder
from megadiff.checkpoint.reader import check_shapes
from megadiff.checkpoint.weight_files import WeightFiles
from megadiff.checkpoint.writer import begin_save, publish, sync_file, whole_piece, write_rank_file
from megadiff.config.load import config_from_dict, config_to_dict, to_yaml
from megadiff.config.schema import Config, DataConfig, DiffusionConfig, ModelConfig, SamplingConfig
from megadiff.errors import CheckpointError, ConfigError
from megadiff.models.sizes import text_size

# What published weights were trained with; used where the weights do not say: DDPM and DiT (arXiv 2006.11239,
# 2212.09748), and latent diffusion with a text (arXiv 2112.10752).
_PUBLISHED_DIFFUSION = DiffusionConfig(schedule="linear", prediction="eps", num_train_timesteps=1000)
_PUBLISHED_TEXT_DIFFUSION = DiffusionConfig(schedule="scaled_linear", prediction="eps", num_train_timesteps=1000)
# Settings of a network that its weights do not depend on.
_FREE_MODEL_FIELDS = {"preset", "dropout", "attention_dropout"}
_COUNTERS = ("step", "samples", "ema_updates", "optimizer_steps", "skipped_steps")


@dataclass(frozen=True)
class ImportSettings:
    """How to understand the weights.

    Attributes:
        convention: whose names they carry.
        config: the run's settings, if the user gives any; its network must be that of the weights.
        num_heads: attention heads, where the weights do not say and are of no published size.
        accept_norm_eps: take weights that were trained with another LayerNorm epsilon.
        max_shard_bytes: most bytes of one file of the checkpoint, and so of the memory needed.
    """

    convention: ConventionName
    config: Config | None = None
    num_heads: int | None = None
    accept_norm_eps: bool = False
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES


def import_weights(source: Path, target: Path, settings: ImportSettings) -> Config:
    """Writes a run folder whose checkpoint of step 0 holds the weights, as raw weights and as moving average.

    Args:
        source: a folder with safetensors weights (and config.json for diffusers), or one safetensors file.
        target: the new run folder; it appears only when complete.
        settings: how to understand the weights.

    Returns:
        The config of the new run.

    Raises:
        CheckpointError: `target` exists, or the weights are damaged or do not fit convention or network.
    """
    convention = CONVENTIONS[settings.convention]
    files = WeightFiles(source)
    config = _config(convention, files, settings)
    shapes = parameter_shapes(config.model)
    rows = convention.rows(config.model)
    theirs = {row.theirs: row_shape(row, shapes, config.model) for row in rows}
    check_shapes(files.shapes, theirs, f"{source} ({convention.title})")
    weights = _Import(files, rows, shapes)
    weights.check_duplicates()
    _check_positions(files, rows, config.model)
    with new_folder(target) as folder:
        path = folder / "config.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        sync_file(path)
        _write_checkpoint(folder / CHECKPOINTS, config, weights, settings.max_shard_bytes)
    return config


def _config(convention: Convention, files: WeightFiles, settings: ImportSettings) -> Config:
    """The settings of the new run: the user's, else the network of the weights and defaults."""
    given = settings.config
    origin = Origin(
        shapes=files.shapes,
        metadata=files.metadata,
        config=files.config,
        expected=given.model if given else None,
        num_heads=settings.num_heads,
        accept_norm_eps=settings.accept_norm_eps,
    )
    try:
        model = convention.read_model(origin)
        if given is not None:
            _compare_networks(files.path, given.model, model)
            return given
        # The id data set needs nothing on disk and fits any network; the weights say nothing of their data.
        config = Config(
            model=model,
            diffusion=_diffusion(model, files.metadata),
            sampling=SamplingConfig() if model.condition != "none" else SamplingConfig(guidance=1.0),
            data=DataConfig(name="ids"),
        )
        return config_from_dict(config_to_dict(config))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{files.path} describes no usable network ({where}: {first['msg']})") from None
    except ConfigError as error:
        raise CheckpointError(f"{files.path} describes no usable network: {error}") from None


def _compare_networks(path: Path, given: ModelConfig, found: ModelConfig) -> None:
    for key, value in found.model_dump(exclude=_FREE_MODEL_FIELDS).items():
        if getattr(given, key) != value:
            raise CheckpointError(
                f"model.{key} = {getattr(given, key)} in the config, but {path} holds a network "
                f"with {value}; change the config"
            )


def _diffusion(model: ModelConfig, metadata: Mapping[str, str]) -> DiffusionConfig:
    if "diffusion" in metadata:
        return DiffusionConfig.model_validate_json(metadata["diffusion"])
    return _PUBLISHED_TEXT_DIFFUSION if text_size(model) else _PUBLISHED_DIFFUSION


def _check_positions(files: WeightFiles, rows: list[NameRow], model: ModelConfig) -> None:
    for row in rows:
        if row.ours:
            continue
        stored = files.read(row.theirs)
        # Others may have computed the table in float32, where the angles (up to N) cost some digits.
        tolerance = max(1e-5, torch.finfo(stored.dtype).eps)
        worst = float((stored.double() - position_table(model).double()).abs().max())
        if not worst <= tolerance:
            raise CheckpointError(
                f"{files.path}: {row.theirs} differs by {worst:.2g} from the sine-cosine positions that this "
                "network always uses; it cannot be imported"
            )


class _Import:
    """Our parameters, read from files with other names."""

    def __init__(self, files: WeightFiles, rows: list[NameRow], shapes: Shapes) -> None:
        self.files, self.rows, self.shapes = files, rows, shapes
        self.row_of: dict[str, NameRow] = {}
        for row in rows:
            for name in row.ours:
                self.row_of.setdefault(name, row)

    def read(self, name: str) -> Tensor:
        """A parameter in float32, or in float64 where it is stored so."""
        part = self._part(self.row_of[name], name)
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)

    def check_duplicates(self) -> None:
        """Checks that all copies of a parameter that the other side holds several times are equal."""
        for row in self.rows:
            for name in row.ours:
                first = self.row_of[name]
                if row is not first and not torch.equal(self._part(first, name), self._part(row, name)):
                    raise CheckpointError(
                        f"{self.files.path}: {row.theirs} differs from {first.theirs}, but this network has "
                        f"one {name} for both; it cannot be imported"
                    )

    def _part(self, row: NameRow, name: str) -> Tensor:
        """The rows of their tensor that are our parameter."""
        start = 0
        for other in row.ours:
            if other == name:
                break
            start += self.shapes[other][0]
        return self.files.read(row.theirs)[start : start + self.shapes[name][0]]


def _write_checkpoint(root: Path, config: Config, weights: _Import, max_shard_bytes: int) -> None:
    """A checkpoint as training writes it, in as many files as the memory allowed asks for."""
    temporary = begin_save(root, 0)
    names = list(weights.shapes)
    shards = plan_shards([4 * math.prod(weights.shapes[name]) for name in names], max_shard_bytes)
    manifests: list[RankManifest] = []
    for shard in shards:
        manifests += _write_shard(temporary, len(manifests), [names[position] for position in shard], weights)
    counters: Counters = dict.fromkeys(_COUNTERS, 0)
    index = build_index(0, counters, config_to_dict(config), manifests)
    publish(temporary, checkpoint_folder(root, 0), index)


def _write_shard(folder: Path, first: int, names: list[str], weights: _Import) -> list[RankManifest]:
    """Two files, numbered from `first`: the parameters as raw weights and again as moving average."""
    tensors = {name: weights.read(name) for name in names}
    return [
        write_rank_file(folder, first + number, [whole_piece(kind, name, t) for name, t in tensors.items()])
        for number, kind in enumerate(("model", "ema"))
    ]
