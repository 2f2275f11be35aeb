"""Pipeline schedules as data: what each rank computes, sends and receives, in order.

`1f1b` and `folded` are DeepSpeed's own instruction streams; the others are written here from their papers, to compare.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from deepspeed.runtime.pipe import schedule as deepspeed_schedules

from megadiff.errors import PlanError
from megadiff.parallel.program import Exchange, Kind, Message, Pass, Program, Steps
from megadiff.parallel.zero_bubble_v import zero_bubble_v_steps

Schedule = Literal["gpipe", "1f1b", "folded", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev"]
_DUALPIPEV: tuple[Schedule, ...] = ("folded", "dualpipev")
_MIRRORED: tuple[Schedule, ...] = (*_DUALPIPEV, "zb-v")


def build_program(schedule: Schedule, num_stages: int, num_ranks: int, micro_batches: int) -> Program:
    """The steps of every rank under a schedule.

    Args:
        schedule: `gpipe` (Huang et al. 2019), `1f1b`, `interleaved` (Narayanan et al. 2021), `zb-h1`, `zb-h2` and
            `zb-v` (Qi et al. 2023), `dualpipev` (DeepSeek-AI 2025), or `folded`, which is DualPipeV without deferred
            weight gradients, as DeepSpeed runs it.
        num_stages: one a rank; two for the last three; two or more for `interleaved`.
        num_ranks: pipeline ranks.
        micro_batches: of one step.

    Raises:
        PlanError: a number of stages or micro-batches that the schedule cannot have.
    """
    _check(schedule, num_stages, num_ranks, micro_batches)
    if schedule in _MIRRORED:
        placement = (*range(num_ranks), *reversed(range(num_ranks)))
    else:
        placement = tuple(stage % num_ranks for stage in range(num_stages))
    if schedule == "zb-v":
        steps = zero_bubble_v_steps(num_ranks, micro_batches)
    else:
        build = _BUILDERS[schedule]
        steps = tuple(build(rank, num_ranks, num_stages, micro_batches) for rank in range(num_ranks))
    return Program(steps, placement, is_eager=schedule not in ("1f1b", "folded"))


def _check(schedule: Schedule, num_stages: int, num_ranks: int, micro_batches: int) -> None:
    where = f"pipeline_schedule = {schedule} over {num_ranks} ranks"
    if num_ranks < 1 or micro_batches < 1:
        raise PlanError(f"{where} with {micro_batches} micro-batches is no pipeline; use at least 1 of each")
    if schedule == "interleaved":
        if num_stages < 2 * num_ranks or num_stages % num_ranks:
            raise PlanError(
                f"{where} needs a multiple of {num_ranks} and at least {2 * num_ranks} stages, got {num_stages}"
            )
        if micro_batches % num_ranks:
            raise PlanError(f"{where} needs a multiple of {num_ranks} micro-batches, got {micro_batches}")
        return
    stages_per_rank = 2 if schedule in _MIRRORED else 1
    if num_stages != stages_per_rank * num_ranks:
        raise PlanError(f"{where} needs {stages_per_rank * num_ranks} stages, got {num_stages}")
    if schedule in _DUALPIPEV and micro_batches < 2 * num_ranks:
        raise PlanError(f"{where} needs at least {2 * num_ranks} micro-batches, got {micro_batches}")


def _one_forward_one_backward(rank: int, num_ranks: int, num_stages: int, micro_batches: int) -> Steps:
    """DeepSpeed's TrainSchedule: every send and receive blocks where it stands."""
    schedule = deepspeed_schedules.TrainSchedule(micro_batches, num_ranks, rank)
    steps: list[Pass | Exchange] = []
    for step in _translate(schedule, (rank,)):
        if step is not None:
            steps.append(step)
    return steps


def _folded(rank: int, num_ranks: int, num_stages: int, micro_batches: int) -> Steps:
    """DeepSpeed's DualPipeVSchedule: sends and receives gather until the next CommitP2P and then block together."""
    schedule = deepspeed_schedules.DualPipeVSchedule(micro_batches, num_ranks, rank)
    steps: list[Pass | Exchange] = []
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    for step in _translate(schedule, (rank, num_stages - 1 - rank)):
        if isinstance(step, Exchange):
            sends, receives = sends + step.sends, receives + step.receives
        elif step is not None:
            steps.append(step)
        elif sends or receives:
            steps.append(Exchange(sends, receives))
            sends, receives = (), ()
    return steps


def _translate(schedule: Any, own_stages: Sequence[int]) -> Iterator[Pass | Exchange | None]:
    """DeepSpeed's instructions as steps, None for CommitP2P; each kind takes the micro-batches in their order."""
    seen: Counter[tuple[str, int]] = Counter()
    for instruction in (instruction for step in schedule.steps() for instruction in step):
        phase = instruction.kwargs.get("phase", 0)
        stage, micro_batch = own_stages[phase], seen[instruction.name, phase]
        seen[instruction.name, phase] += 1
        match instruction.name:
            case "ForwardPass":
                yield Pass("forward", stage, micro_batch)
            case "BackwardPass":
                yield Pass("backward", stage, micro_batch)
            case "SendActivation":
                yield Exchange((Message(False, stage, micro_batch),), ())
            case "RecvActivation":
                yield Exchange((), (Message(False, stage - 1, micro_batch),))
            case "SendGrad":
                yield Exchange((Message(True, stage, micro_batch),), ())
            case "RecvGrad":
                yield Exchange((), (Message(True, stage + 1, micro_batch),))
            case "CommitP2P":
                yield None


def _alternate(forwards: Sequence[Pass], backwards: Sequence[Sequence[Pass]], num_ahead: int) -> list[Pass]:
    """`num_ahead` forward passes, then one backward after every forward, then the other backwards."""
    steps = list(forwards[:num_ahead])
    for index, backward in enumerate(backwards):
        steps += [*forwards[num_ahead + index : num_ahead + index + 1], *backward]
    return steps


def _gpipe(rank: int, num_ranks: int, num_stages: int, micro_batches: int) -> Steps:
    forwards = [Pass("forward", rank, index) for index in range(micro_batches)]
    return _alternate(forwards, [[Pass("backward", rank, index)] for index in range(micro_batches)], micro_batches)


def _interleaved(rank: int, num_ranks: int, num_stages: int, micro_batches: int) -> Steps:
    """Groups of num_ranks micro-batches go through all stages of a rank, which is so many more forwards ahead."""
    own = range(rank, num_stages, num_ranks)
    groups = [range(start, start + num_ranks) for start in range(0, micro_batches, num_ranks)]
    forwards = [Pass("forward", stage, index) for group in groups for stage in own for index in group]
    backwards = [[Pass("backward", stage, index)] for group in groups for stage in reversed(own) for index in group]
    return _alternate(forwards, backwards, 2 * (num_ranks - rank - 1) + (len(own) - 1) * num_ranks)


def _zero_bubble(ahead: int) -> Callable[[int, int, int, int], Steps]:
    """ZB-H1 (ahead = 1) or ZB-H2 (2): weight gradients wait so that every rank holds as many activations as rank 0."""

    def build(rank: int, num_ranks: int, num_stages: int, micro_batches: int) -> Steps:
        forwards = [Pass("forward", rank, index) for index in range(micro_batches)]
        backwards: list[list[Pass]] = []
        for index in range(micro_batches):
            deferred = [Pass("weight_gradient", rank, index - ahead * rank)] if index >= ahead * rank else []
            backwards.append([Pass("input_gradient", rank, index), *deferred])
        rest = range(max(0, micro_batches - ahead * rank), micro_batches)
        steps = _alternate(forwards, backwards, ahead * (num_ranks - rank - 1))
        return steps + [Pass("weight_gradient", rank, index) for index in rest]

    return build


class _Phases:
    """The steps of a rank with two stages, each of which sees the micro-batches in order."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.stages, self.steps, self.deferred = stages, list[Pass](), list[Pass]()
        self.seen: Counter[tuple[str, int]] = Counter()

    def forward(self, phase: int) -> None:
        self._add("forward", phase)

    def backward(self, phase: int, defers: bool = False) -> None:
        """Both gradients, or the input's now and the weights' when `weights` is called."""
        self._add("input_gradient" if defers else "backward", phase)
        if defers:
            self.deferred.append(self.steps[-1]._replace(kind="weight_gradient"))

    def weights(self) -> None:
        """The oldest deferred weight gradients."""
        self.steps.append(self.deferred.pop(0))

    def _add(self, kind: Kind, phase: int) -> None:
        direction = "forward" if kind == "forward" else "backward"
        self.steps.append(Pass(kind, self.stages[phase], self.seen[direction, phase]))
        self.seen[direction, phase] += 1


def _dualpipev(rank: int, num_ranks: int, num_stages: int, micro_batches: int) -> Steps:
    """The same order as `folded`, with the weight gradients of the start and the end deferred into its gaps."""
    phases, later = _Phases((rank, num_stages - 1 - rank)), num_ranks - rank - 1
    for _ in range(2 * later):
        phases.forward(0)
    for _ in range(rank + 1):
        phases.forward(0)
        phases.forward(1)
    for _ in range(later):
        phases.backward(1, defers=True)
        phases.weights()
        phases.forward(1)
    for _ in range(micro_batches - 2 * num_ranks + rank + 1):
        phases.forward(0)
        phases.backward(1)
        phases.forward(1)
        phases.backward(0)
    for _ in range(later):
        phases.backward(1)
        phases.forward(1)
        phases.backward(0)
    for number in range(2 * (rank + 1)):
        phases.backward(1 - number % 2, defers=number > rank)
    for _ in range(later):
        phases.weights()
        phases.backward(0, defers=True)
    for _ in range(rank + 1):
        phases.weights()
    return phases.steps


_BUILDERS: dict[Schedule, Callable[[int, int, int, int], Steps]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "folded": _folded,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble(1),
    "zb-h2": _zero_bubble(2),
    "dualpipev": _dualpipev,
}
