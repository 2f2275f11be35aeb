"""How a step's forward and backward passes run: on the whole network, or on a stage of a pipeline.

Both drive DeepSpeed through one optimizer step and return the losses of this rank's samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import deepspeed
import torch
from torch import Tensor

from megadiff.diffusion.objective import DiffusionObjective, TrainingInputs
from megadiff.engine.output_gradient import OutputGradient

LossArguments = tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor] | None]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What the network sees and what its answer is compared with; `mask` is (B, 1, H, W) or None.

    `sample_ids` (B,) are the samples' positions in the global stream.
    """

    inputs: TrainingInputs
    sample_ids: Tensor
    mask: Tensor | None


class Runner(Protocol):
    """One optimizer step's computation."""

    def run(self, micro_batches: Sequence[MicroBatch], loss_scale: Tensor) -> Tensor | None:
        """Runs all micro-batches and the optimizer step.

        Args:
            micro_batches: as many as the accumulation; empty on stages that read no data.
            loss_scale: 0-dim factor on each micro-batch's loss sum, so that DeepSpeed's mean over micro-batches and
                data ranks is the mean over the elements of the global batch.

        Returns:
            (B,) the unscaled loss sum of each sample of this rank in order, detached; None where no loss is computed.
        """
        ...


class WholeRunner:
    """The whole network is on this rank (in parts, where tensor parallelism or ZeRO shards it)."""

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, objective: DiffusionObjective, gradient: OutputGradient | None
    ) -> None:
        self.engine, self.objective, self.gradient = engine, objective, gradient

    def run(self, micro_batches: Sequence[MicroBatch], loss_scale: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        for micro in micro_batches:
            inputs = micro.inputs
            output = self.engine((inputs.x_t, inputs.t, inputs.labels))
            loss = self.objective.losses(output, inputs.target, inputs.weight, micro.mask, inputs.pictures)
            if self.gradient is not None:
                self.gradient.watch(loss)
            losses.append(loss.detach())
            self.engine.backward(loss.sum() * loss_scale)
            self.engine.step()
        return torch.cat(losses)


class PipelineLoss:
    """The loss function of the last stage; it keeps the unrounded losses, because DeepSpeed reports float32."""

    def __init__(self, objective: DiffusionObjective, gradient: OutputGradient | None) -> None:
        self.objective, self.gradient = objective, gradient
        self.scale = torch.ones(())
        self.losses: list[Tensor] = []

    def __call__(self, output: Tensor, labels: tuple[Tensor, ...]) -> Tensor:
        loss = self.objective.losses(output, *_arguments_of_loss(labels, self.objective.perceptual is not None))
        if self.gradient is not None:
            self.gradient.watch(loss)
        self.losses.append(loss.detach())
        return loss.sum() * self.scale


class PipelineRunner:
    """This rank holds stages; DeepSpeed's schedule (1F1B or DualPipeV) moves states between them."""

    def __init__(self, engine: deepspeed.PipelineEngine, loss: PipelineLoss) -> None:
        self.engine, self.loss = engine, loss

    def run(self, micro_batches: Sequence[MicroBatch], loss_scale: Tensor) -> Tensor | None:
        self.loss.scale, self.loss.losses = loss_scale, []
        self.engine.train_batch(data_iter=_pipeline_items(micro_batches))
        return torch.cat(self.loss.losses) if self.loss.losses else None


def _labels_of(micro: MicroBatch) -> tuple[Tensor, ...]:
    """What the loss needs besides the output, as the plain tensors that DeepSpeed hands on."""
    inputs, mask = micro.inputs, () if micro.mask is None else (micro.mask,)
    return inputs.target, inputs.weight, *mask, *(inputs.pictures or ())


def _arguments_of_loss(labels: tuple[Tensor, ...], has_pictures: bool) -> LossArguments:
    """Target, weight, mask and pictures again."""
    target, weight, *others = labels
    pictures = (others[-3], others[-2], others[-1]) if has_pictures else None
    mask = others[0] if len(others) in (1, 4) else None
    return target, weight, mask, pictures


def _pipeline_items(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """What DeepSpeed's first stage (inputs) and last stage (labels of the loss) take from their data iterator."""
    for micro in micro_batches:
        inputs = micro.inputs
        yield (inputs.x_t, inputs.t, inputs.labels), _labels_of(micro)
