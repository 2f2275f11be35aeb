"""An executable model of pipeline schedules: from costs of stages and links to step time, idle time, memory and bytes.

Ranks compute one pass at a time. A message takes its link for bytes / bandwidth and arrives a latency later; both sides
of an exchange wait for it, unless the schedule sends eagerly, and then only who needs it waits. Messages between two
stages on one rank are free. Launch overheads and the optimizer step are not modelled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megadiff.errors import PlanError
from megadiff.parallel.program import Exchange, Message, Pass, Program, needed_message
from megadiff.parallel.schedules import Schedule, build_program


@dataclass(frozen=True)
class StageCost:
    """What one micro-batch costs a stage.

    Attributes:
        forward: seconds.
        backward: seconds, for the gradients of inputs and weights together.
        weight: seconds of `backward` that are the weights' part.
        activation_bytes: held from the forward pass to the end of the backward pass.
        boundary_bytes: sent to the next stage; the gradient that comes back is as large.
    """

    forward: float
    backward: float
    weight: float
    activation_bytes: int
    boundary_bytes: int


@dataclass(frozen=True)
class Link:
    """A link between two ranks, in each direction: bytes per second (may be infinite) and seconds of latency."""

    bytes_per_second: float
    latency: float


@dataclass(frozen=True)
class Simulation:
    """One step.

    Attributes:
        step_seconds: until the last rank is done.
        bubble: share of all ranks' time in which they compute nothing.
        busy: seconds of computation of each rank.
        spans: seconds from the start of a rank's first pass to the end of its last.
        peak_activations: bytes of each rank.
        sent_bytes: of each rank to other ranks.
    """

    step_seconds: float
    bubble: float
    busy: tuple[float, ...]
    spans: tuple[float, ...]
    peak_activations: tuple[int, ...]
    sent_bytes: tuple[int, ...]


def simulate(
    schedule: Schedule, stages: Sequence[StageCost], num_ranks: int, micro_batches: int, link: Link
) -> Simulation:
    """Runs one step of a schedule.

    Args:
        schedule: `1f1b` and `folded` follow DeepSpeed's own instructions, see `build_program` for the others.
        stages: costs of all stages in the order of the network.
        num_ranks: pipeline ranks.
        micro_batches: of one step.
        link: between any two ranks.

    Raises:
        PlanError: the schedule does not exist for these numbers.
    """
    run = _Run(build_program(schedule, len(stages), num_ranks, micro_batches), stages, link)
    run.finish(schedule)
    step = max(run.clock)
    return Simulation(
        step_seconds=step,
        bubble=1 - sum(run.busy) / (num_ranks * step) if step else 0.0,
        busy=tuple(run.busy),
        spans=tuple(run.spans),
        peak_activations=tuple(run.peak),
        sent_bytes=tuple(run.sent),
    )


class _Run:
    """The state of all ranks; each works through its steps as far as what it waits for is there."""

    def __init__(self, program: Program, stages: Sequence[StageCost], link: Link) -> None:
        self.program, self.stages, self.link = program, stages, link
        num_ranks = len(program.steps)
        self.clock, self.busy, self.spans = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
        self.position, self.held, self.peak, self.sent = ([0] * num_ranks for _ in range(4))
        self.started = dict[int, float]()
        self.made = set[Message]()  # what was computed
        self.arrived = dict[Message, float]()  # when it can be used
        self.posted = dict[Message, dict[bool, float]]()  # when its receiver (False) and its sender (True) are ready
        self.link_free = dict[tuple[int, int], float]()

    def finish(self, schedule: str) -> None:
        """Runs all ranks to their ends."""
        ranks = range(len(self.program.steps))
        while any([self._advance(rank) for rank in ranks]):
            pass
        stuck = [rank for rank in ranks if self.position[rank] < len(self.program.steps[rank])]
        if stuck:
            step = self.program.steps[stuck[0]][self.position[stuck[0]]]
            raise PlanError(f"schedule {schedule} stands still: rank {stuck[0]} waits at {step}")

    def _advance(self, rank: int) -> bool:
        """Takes as many steps of a rank as can be taken; whether anything changed."""
        before, posted = self.position[rank], len(self.posted)
        steps = self.program.steps[rank]
        while self.position[rank] < len(steps):
            step = steps[self.position[rank]]
            done = self._compute(rank, step) if isinstance(step, Pass) else self._exchange(rank, step)
            if not done:
                break
            self.position[rank] += 1
        return self.position[rank] > before or len(self.posted) > posted

    def _compute(self, rank: int, step: Pass) -> bool:
        needed = needed_message(step, len(self.stages))
        if needed is not None and needed not in self.arrived:
            return False
        start = max(self.clock[rank], self.arrived[needed] if needed is not None else 0.0)
        seconds = self._seconds(step)
        self.clock[rank] = start + seconds
        self.busy[rank] += seconds
        self.spans[rank] = self.clock[rank] - self.started.setdefault(rank, start)
        self._hold(rank, step)
        self._make(rank, step)
        return True

    def _seconds(self, step: Pass) -> float:
        cost = self.stages[step.stage]
        return {
            "forward": cost.forward,
            "backward": cost.backward,
            "input_gradient": cost.backward - cost.weight,
            "weight_gradient": cost.weight,
        }[step.kind]

    def _hold(self, rank: int, step: Pass) -> None:
        if step.kind == "forward":
            self.held[rank] += self.stages[step.stage].activation_bytes
            self.peak[rank] = max(self.peak[rank], self.held[rank])
        elif step.kind != "input_gradient":
            self.held[rank] -= self.stages[step.stage].activation_bytes

    def _make(self, rank: int, step: Pass) -> None:
        """Hands on what a pass computed, if somebody takes it."""
        is_gradient = step.kind != "forward"
        target = step.stage + (-1 if is_gradient else 1)
        if step.kind == "weight_gradient" or not 0 <= target < len(self.stages):
            return
        message = Message(is_gradient, step.stage, step.micro_batch)
        self.made.add(message)
        if self.program.rank_of_stage[target] == rank:
            self.arrived[message] = self.clock[rank]
        elif self.program.is_eager:
            self._transfer(message, self.clock[rank])

    def _transfer(self, message: Message, ready: float) -> None:
        """Moves a message whose two sides are ready."""
        target = message.stage + (-1 if message.is_gradient else 1)
        pair = self.program.rank_of_stage[message.stage], self.program.rank_of_stage[target]
        size = self.stages[min(message.stage, target)].boundary_bytes
        self.link_free[pair] = max(ready, self.link_free.get(pair, 0.0)) + size / self.link.bytes_per_second
        self.arrived[message] = self.link_free[pair] + self.link.latency
        self.sent[pair[0]] += size

    def _exchange(self, rank: int, step: Exchange) -> bool:
        """Posts the sides of an exchange and waits for the others; whether all messages have arrived."""
        sides = [(message, True) for message in step.sends] + [(message, False) for message in step.receives]
        for message, is_sender in sides:
            assert message in self.made or not is_sender, f"rank {rank} sends {message} before it is computed"
            posted = self.posted.setdefault(message, {})
            if is_sender not in posted:
                posted[is_sender] = self.clock[rank]
                if posted.keys() == {True, False}:
                    self._transfer(message, max(posted.values()))
        if any(message not in self.arrived for message, _ in sides):
            return False
        self.clock[rank] = max([self.clock[rank], *(self.arrived[message] for message, _ in sides)])
        return True
