"""A trained network for sampling, without an optimizer: this rank's part of it, from a checkpoint of any layout."""

from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megadiff.checkpoint.names import parameter_shapes
from megadiff.checkpoint.reader import CheckpointReader
from megadiff.config.layout import resolve_layout
from megadiff.config.schema import Config
from megadiff.dist.agree import together
from megadiff.dist.grid import Grid, make_grid
from megadiff.dist.process import Process
from megadiff.engine.generate import generate_on_grid
from megadiff.errors import CheckpointError
from megadiff.models.feature_cache import HitRate
from megadiff.models.sizes import output_channels
from megadiff.parallel.forward import open_predict, predict
from megadiff.parallel.stage import Stage, build_stage
from megadiff.sampling.generate import ImageRequest
from megadiff.sampling.guidance import Predict

Weights = Literal["ema", "raw"]


class Network:
    """A trained network on a layout.

    Attributes:
        config: the settings it was trained with, on the layout of this process group.
        grid: the layout.
        answers: how many positions of batches went through `open_predict` on this rank.
        reused: counts features that were reused on this rank, see `megadiff.models.feature_cache`.
    """

    def __init__(self, config: Config, checkpoint: Path, weights: Weights, process: Process) -> None:
        """Builds and loads this rank's part; a collective call.

        Args:
            config: the checkpoint's settings with the parallel section of this process group.
            checkpoint: a checkpoint folder.
            weights: the moving average or the raw weights.
            process: this process.

        Raises:
            CheckpointError: damaged, from another network, or without the chosen weights.
        """
        layout = resolve_layout(config, process.world_size)
        self.config, self.device = config, process.device
        self.reused, self.answers = HitRate(), 0
        self.grid: Grid = make_grid(layout.pipeline, layout.data, layout.tensor, layout.folded)
        self._stage: Stage = build_stage(config, self.grid, process.device, torch.float32)
        together(lambda: _load(self._stage, config, checkpoint, "ema" if weights == "ema" else "model"))

    def predict(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """See `Engine.predict`."""
        return predict(self._stage, self.grid, output_channels(self.config.model), x_t, t, labels)

    def open_predict(self, cache_threshold: float) -> Predict:
        """`predict` for the calls of one batch of pictures, see `megadiff.parallel.forward.open_predict`."""
        opened = open_predict(self._stage, self.grid, self.config.model, cache_threshold, self.reused)

        def counted(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
            self.answers += len(x_t)
            return opened(x_t, t, labels)

        return counted

    def generate(self, request: ImageRequest) -> Tensor:
        """(N, C, H, W) images on every rank; a collective call."""
        opened = partial(self.open_predict, self.config.sampling.cache_threshold)
        return generate_on_grid(request, self.config, opened, self.device, self.grid.data)


@torch.no_grad()
def _load(stage: Stage, config: Config, checkpoint: Path, kind: str) -> None:
    with CheckpointReader(checkpoint) as reader:
        reader.verify()
        if kind not in reader.kinds():
            raise CheckpointError(f"{checkpoint} holds no moving average; use --weights raw")
        reader.check_shapes(kind, parameter_shapes(config.model))
        for name, parameter in stage.chain.named_parameters():
            part = stage.sharding.slices.get(name)
            offset = (0,) * parameter.dim() if part is None else part.offset
            parameter.copy_(reader.read_box(kind, name, offset, tuple(parameter.shape)))
