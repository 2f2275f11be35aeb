"""The words of a pipeline program: passes, messages and exchanges, in each rank's order. Knows no schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "input_gradient", "weight_gradient"]


class Pass(NamedTuple):
    """Work on one micro-batch in one stage; `backward` is both gradients at once, the last two are its parts."""

    kind: Kind
    stage: int
    micro_batch: int


class Message(NamedTuple):
    """What a stage computed for a micro-batch: its output, for the next stage, or a gradient, for the one before."""

    is_gradient: bool
    stage: int
    micro_batch: int


class Exchange(NamedTuple):
    """Messages that start together and that a rank waits for, on both sides, before it goes on."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Steps = Sequence[Pass | Exchange]


@dataclass(frozen=True)
class Program:
    """A schedule for a number of ranks and micro-batches.

    Attributes:
        steps: of each rank, in its order.
        rank_of_stage: the rank that runs each stage.
        is_eager: messages leave when they are ready and nobody waits to send, so that the steps name no exchanges.
    """

    steps: tuple[Steps, ...]
    rank_of_stage: tuple[int, ...]
    is_eager: bool


def needed_message(step: Pass, num_stages: int) -> Message | None:
    """What a pass works on; the first stage reads data, and the last one's gradient comes from the loss."""
    if step.kind == "forward" and step.stage > 0:
        return Message(False, step.stage - 1, step.micro_batch)
    if step.kind in ("backward", "input_gradient") and step.stage + 1 < num_stages:
        return Message(True, step.stage + 1, step.micro_batch)
    return None
