"""How a step's forward and backward passes run: on the whole network, or on a stage of a pipeline.

Both drive DeepSpeed through one optimizer step and return this rank's part of the loss.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import deepspeed
import torch
from torch import Tensor

from megadiff.diffusion.objective import DiffusionObjective, TrainingInputs


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What the network sees and what its answer is compared with; `mask` is (B, 1, H, W) or None."""

    inputs: TrainingInputs
    mask: Tensor | None


class Runner(Protocol):
    """One optimizer step's computation."""

    def run(self, micro_batches: Sequence[MicroBatch], loss_scale: Tensor) -> Tensor:
        """Runs all micro-batches and the optimizer step.

        Args:
            micro_batches: as many as the accumulation; empty on stages that read no data.
            loss_scale: 0-dim factor on each micro-batch's loss sum, so that DeepSpeed's mean over micro-batches and
                data ranks is the mean over the elements of the global batch.

        Returns:
            The sum over micro-batches of the unscaled loss sums, detached; zero on ranks that compute no loss.
        """
        ...


class WholeRunner:
    """The whole network is on this rank (in parts, where tensor parallelism or ZeRO shards it)."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, objective: DiffusionObjective, device: torch.device) -> None:
        self.engine, self.objective, self.device = engine, objective, device

    def run(self, micro_batches: Sequence[MicroBatch], loss_scale: Tensor) -> Tensor:
        total: Tensor | None = None
        for micro in micro_batches:
            inputs = micro.inputs
            output = self.engine((inputs.x_t, inputs.t, inputs.labels))
            loss = self.objective.loss_sum(output, inputs.target, inputs.weight, micro.mask)
            self.engine.backward(loss * loss_scale)
            total = loss.detach() if total is None else total + loss.detach()
            self.engine.step()
        assert total is not None, "a step without micro-batches"
        return total


class PipelineLoss:
    """The loss function of the last stage; it keeps the unrounded sums, because DeepSpeed reports float32."""

    def __init__(self, objective: DiffusionObjective) -> None:
        self.objective = objective
        self.scale = torch.ones(())
        self.sums: list[Tensor] = []

    def __call__(self, output: Tensor, labels: tuple[Tensor, ...]) -> Tensor:
        loss = self.objective.loss_sum(output, *labels)
        self.sums.append(loss.detach())
        return loss * self.scale


class PipelineRunner:
    """This rank holds stages; DeepSpeed's schedule (1F1B or DualPipeV) moves states between them."""

    def __init__(self, engine: deepspeed.PipelineEngine, loss: PipelineLoss, device: torch.device) -> None:
        self.engine, self.loss, self.device = engine, loss, device

    def run(self, micro_batches: Sequence[MicroBatch], loss_scale: Tensor) -> Tensor:
        self.loss.scale, self.loss.sums = loss_scale, []
        self.engine.train_batch(data_iter=_pipeline_items(micro_batches))
        if self.loss.sums:
            return torch.stack(self.loss.sums).sum()
        return torch.zeros((), device=self.device)


def _pipeline_items(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """What DeepSpeed's first stage (inputs) and last stage (labels of the loss) take from their data iterator."""
    for micro in micro_batches:
        inputs = micro.inputs
        labels = (inputs.target, inputs.weight)
        yield (inputs.x_t, inputs.t, inputs.labels), labels if micro.mask is None else (*labels, micro.mask)
