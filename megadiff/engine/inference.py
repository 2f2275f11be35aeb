"""A trained network for sampling, without an optimizer: this rank's part of it, from a checkpoint of any layout."""

from dataclasses import dataclass
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
from megadiff.models.int8 import held_bytes, quantize_int8, require_torchao
from megadiff.models.sizes import output_channels
from megadiff.parallel import collectives
from megadiff.parallel.forward import open_predict, predict
from megadiff.parallel.stage import Stage, build_stage
from megadiff.sampling.generate import ImageRequest
from megadiff.sampling.guidance import Predict

Weights = Literal["ema", "raw"]
Quantization = Literal["none", "int8"]


@dataclass(frozen=True)
class Quantized:
    """What quantization did to one whole copy of the network.

    Attributes:
        bytes_before, bytes_after: of memory that the network keeps.
        is_reduced: some linear layer uses 7 bits, for a CPU whose products of 8 bits overflow.
    """

    bytes_before: int
    bytes_after: int
    is_reduced: bool

    def __str__(self) -> str:
        ratio = self.bytes_after / self.bytes_before
        bits = "; linear layers use 7 bits, as this CPU has no VNNI" if self.is_reduced else ""
        return (
            f"the network takes {self.bytes_after:,} bytes instead of {self.bytes_before:,} (ratio {ratio:.3f}){bits}"
        )


class Network:
    """A trained network on a layout.

    Attributes:
        config: the settings it was trained with, on the layout of this process group.
        grid: the layout.
        answers: how many positions of batches went through `open_predict` on this rank.
        reused: counts features that were reused on this rank, see `megadiff.models.feature_cache`.
        quantized: what quantization did, None without.
    """

    def __init__(
        self,
        config: Config,
        checkpoint: Path,
        weights: Weights,
        process: Process,
        quantization: Quantization = "none",
    ) -> None:
        """Builds and loads this rank's part; a collective call.

        Args:
            config: the checkpoint's settings with the parallel section of this process group.
            checkpoint: a checkpoint folder.
            weights: the moving average or the raw weights.
            process: this process.
            quantization: of the loaded weights; int8 does not know tensor-parallel shards.

        Raises:
            CheckpointError: damaged, from another network, or without the chosen weights.
            ConfigError: int8 without torchao.
        """
        if quantization == "int8":
            assert config.parallel.tensor_model_parallel_size == 1, "refused by the command"
            together(require_torchao)  # before a long load
        layout = resolve_layout(config, process.world_size)
        self.config, self.device = config, process.device
        self.reused, self.answers = HitRate(), 0
        self.grid: Grid = make_grid(layout.pipeline, layout.data, layout.tensor, layout.folded)
        self._stage: Stage = build_stage(config, self.grid, process.device, torch.float32)
        together(lambda: _load(self._stage, config, checkpoint, "ema" if weights == "ema" else "model"))
        self.quantized = _quantize(self._stage, self.grid) if quantization == "int8" else None

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


def _quantize(stage: Stage, grid: Grid) -> Quantized:
    """Quantizes this rank's part, and counts over all stages."""
    before = held_bytes(stage.chain)
    is_reduced = quantize_int8(stage.chain)
    device = next(stage.chain.parameters()).device
    counts = torch.tensor([before, held_bytes(stage.chain), is_reduced], device=device)
    total_before, total_after, reduced = collectives.all_reduce(counts, grid.pipe).tolist()
    return Quantized(total_before, total_after, reduced > 0)
