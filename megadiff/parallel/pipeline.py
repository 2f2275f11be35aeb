"""Stages on DeepSpeed's pipelines: one layer of the PipelineModule is one whole stage.

So parameters keep their global names, and partition, recomputation and dropout are the chain's own on every layout.
"""

from collections.abc import Callable, Sequence

from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from torch import Tensor

from megadiff.dist.grid import Grid
from megadiff.dist.process import quiet_stdout
from megadiff.parallel.stage import StageModule

LossFunction = Callable[[Tensor, tuple[Tensor, ...]], Tensor]


class _StageSpec(LayerSpec):
    """A stage; DeepSpeed calls `build` for the stages of this rank only."""

    def __init__(self, module: StageModule | None) -> None:
        super().__init__(StageModule)
        self.module = module

    def build(self, log: bool = False) -> StageModule:
        assert self.module is not None, "a stage of another rank"
        return self.module


def pipeline_module(modules: Sequence[StageModule], grid: Grid, loss_function: LossFunction) -> PipelineModule:
    """Wraps this rank's stages.

    Args:
        modules: one stage, or a stage and its mirror image for DeepSpeed's DualPipeV.
        grid: the layout.
        loss_function: called on the last stage with the network's output and the labels that its data iterator gave.
    """
    kind = DualPipeVModule if grid.is_folded else PipelineModule
    specs = [_StageSpec(None) for _ in range(len(modules) * grid.pipe.degree)]
    for number, module in zip((grid.pipe.index, -1 - grid.pipe.index), modules, strict=False):
        specs[number] = _StageSpec(module)
    with quiet_stdout():
        return kind(layers=specs, topology=grid.topology, loss_fn=loss_function, partition_method="uniform")
