"""Lets all ranks go on together or fail together: a fault on one rank is raised on every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megadiff.errors import MegadiffError

Result = TypeVar("Result")


def together(action: Callable[[], Result]) -> Result:
    """Runs an action on every rank and returns this rank's result; a collective call.

    Raises:
        MegadiffError: what the first rank that failed raised, on every rank.
    """
    fault: MegadiffError | None = None
    try:
        result = action()
    except MegadiffError as error:
        fault = error
    faults: list[MegadiffError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for raised in faults:
        if raised is not None:
            raise raised
    return result


def gather(value: Result) -> list[Result]:
    """The values of all ranks in rank order, on every rank; a collective call."""
    values: list[Result] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first(action: Callable[[], Result]) -> Result:
    """Runs an action on rank 0 and returns its result everywhere; a collective call.

    Raises:
        MegadiffError: what it raised, on every rank.
    """
    box: list[Any] = [together(lambda: action() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(box, src=0)
    result: Result = box[0]
    return result
