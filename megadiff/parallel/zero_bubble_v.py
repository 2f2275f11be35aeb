"""ZB-V (Qi et al. 2023, section 6): two mirrored stages a rank, deferred weight gradients, the memory of 1F1B.

The paper gives the placement, the memory limit and the aim; the order comes from list scheduling in the paper's unit of
time, in which the forward pass and each of the two gradients of a stage take one tick and messages none.
"""

from collections import Counter
from collections.abc import Iterator

from megadiff.parallel.program import Kind, Message, Pass, Steps, needed_message


def zero_bubble_v_steps(num_ranks: int, micro_batches: int) -> tuple[Steps, ...]:
    """The steps of all ranks; 6 micro_batches + num_ranks - 1 ticks from 2 num_ranks micro-batches on, the fewest."""
    ranks = [_Rank(rank, num_ranks, micro_batches) for rank in range(num_ranks)]
    arrived: set[Message] = set()
    while any(rank.is_busy() for rank in ranks):
        # All ranks choose before any result of this tick exists.
        made = [message for rank in ranks for message in rank.tick(arrived)]
        assert made or any(rank.was_busy for rank in ranks), "ZB-V stands still"
        arrived.update(made)
    return tuple(rank.steps for rank in ranks)


class _Rank:
    """One rank, which holds at most the activations of 2 num_ranks half-size stages, as 1F1B's first rank does."""

    def __init__(self, rank: int, num_ranks: int, micro_batches: int) -> None:
        self.outward, self.homeward = rank, 2 * num_ranks - 1 - rank
        self.num_ranks, self.micro_batches = num_ranks, micro_batches
        self.steps, self.deferred, self.was_busy = list[Pass](), list[Pass](), False
        self.done: Counter[tuple[Kind, int]] = Counter()

    def is_busy(self) -> bool:
        """Whether anything is left to do."""
        return len(self.steps) < 6 * self.micro_batches

    def tick(self, arrived: set[Message]) -> Iterator[Message]:
        """Computes the most urgent pass that can run, if any, and gives what it makes."""
        chosen = next((step for step in self._by_urgency() if self._can_run(step, arrived)), None)
        self.was_busy = chosen is not None
        if chosen is None:
            return
        self.steps.append(chosen)
        self.done[chosen.kind, chosen.stage] += 1
        if chosen.kind == "input_gradient":
            self.deferred.append(chosen._replace(kind="weight_gradient"))
        if chosen.kind == "weight_gradient":
            self.deferred.pop(0)
        else:
            yield Message(chosen.kind != "forward", chosen.stage, chosen.micro_batch)

    def _by_urgency(self) -> Iterator[Pass]:
        """Forwards as far as memory allows, what is nearer to its end first; weights fill what would be idle."""
        order: tuple[tuple[Kind, int], ...] = (
            ("forward", self.homeward),
            ("forward", self.outward),
            ("input_gradient", self.outward),
            ("input_gradient", self.homeward),
        )
        for kind, stage in order:
            micro_batch = self.done[kind, stage]
            if micro_batch < self.micro_batches:
                yield Pass(kind, stage, micro_batch)
        yield from self.deferred[:1]

    def _can_run(self, step: Pass, arrived: set[Message]) -> bool:
        if step.kind == "weight_gradient":
            return True
        if step.kind == "forward":
            # An outward stage leaves room for a homeward one, without which no backward pass could ever start.
            held, limit = self._held(self.outward), 2 * self.num_ranks
            if held + self._held(self.homeward) >= limit or (step.stage == self.outward and held >= limit - 1):
                return False
        elif step.micro_batch >= self.done["forward", step.stage]:
            return False
        needed = needed_message(step, 2 * self.num_ranks)
        return needed is None or needed in arrived

    def _held(self, stage: int) -> int:
        return self.done["forward", stage] - self.done["weight_gradient", stage]
