"""A chain on DeepSpeed's pipeline: one layer of the PipelineModule is one whole stage.

So parameters keep their global names, and partition, recomputation and dropout are the chain's own on every layout.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megadiff.dist.grid import Grid
from megadiff.dist.process import quiet_stdout
from megadiff.models.chain import Chain, State

LossFunction = Callable[[Tensor, tuple[Tensor, ...]], Tensor]


class _StageSpec(LayerSpec):
    """A layer that is already built; DeepSpeed calls `build` for the one layer of this rank's stage only."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(Chain)
        self.chain = chain

    def build(self, log: bool = False) -> Chain:
        return self.chain


def pipeline_module(chain: Chain, grid: Grid, loss_function: LossFunction) -> PipelineModule:
    """Wraps this rank's stage.

    Args:
        chain: the layers of this rank's stage.
        grid: the layout; its pipe degree is the number of stages.
        loss_function: called on the last stage with the network's output and the labels that its data iterator gave.
    """
    chain.register_forward_hook(lambda _, inputs, output: _contiguous(output))
    with quiet_stdout():
        return PipelineModule(
            layers=[_StageSpec(chain) for _ in range(grid.pipe.degree)],
            topology=grid.topology,
            loss_fn=loss_function,
            partition_method="uniform",
        )


def _contiguous(state: State) -> State:
    """What can be sent to another rank."""
    return state.contiguous() if isinstance(state, Tensor) else tuple(tensor.contiguous() for tensor in state)


class _Join(torch.autograd.Function):
    """A zero whose gradient hands each of several tensors the gradient that was received for it."""

    @staticmethod
    def forward(ctx: Any, grads: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.grads = grads
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.grads


def walk_backward_once(engine: PipelineEngine) -> None:
    """Makes a stage with several outputs walk its graph once a micro-batch.

    DeepSpeed calls `backward` for each output with the graph retained, so a state of k tensors costs k walks. Here the
    outputs are joined into one tensor first.
    """

    def backward_pass(self: PipelineEngine, buffer_id: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        received = self.grad_layer
        if not self.is_last_stage() and isinstance(outputs, tuple):
            floats = [tensor for tensor in outputs if tensor.is_floating_point()]
            joined = _Join.apply(tuple(grad.clone() for grad in received), *floats)
            self.pipe_buffers["outputs"][buffer_id] = joined
            self.grad_layer = torch.ones_like(joined)
        PipelineEngine._exec_backward_pass(self, buffer_id)
        self.grad_layer = received

    engine._INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, schedule.BackwardPass: backward_pass}
