"""Counts the bytes that this process hands to torch.distributed, by kind of operation and size of group.

DeepSpeed's collectives end in the same functions, so they are counted too. Objects that are pickled and
groups of one process, which move nothing, are left out.
"""

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch.distributed as dist
from torch import Tensor

# The argument of each function that holds its whole payload: what is gathered, what is reduced, what is sent.
_PAYLOAD = {
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "all_gather_into_tensor": "output_tensor",
    "all_gather": "tensor_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter": "input_list",
    "all_to_all_single": "input",
    "send": "tensor",
    "recv": "tensor",
    "isend": "tensor",
    "irecv": "tensor",
}
_KIND = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "isend": "send",
    "irecv": "recv",
}
_PAIRWISE = ("send", "recv")
# DeepSpeed's backend keeps these two functions from the time it started.
_KEPT_BY_DEEPSPEED = {
    "all_gather_function": "all_gather_into_tensor",
    "reduce_scatter_function": "reduce_scatter_tensor",
}


class Transfer(NamedTuple):
    """A kind of operation (`all_gather` and `reduce_scatter` in either spelling) in groups of a size."""

    kind: str
    group_size: int


class Ledger:
    """What a dry run would hand to collectives of a group, by their kind.

    Attributes:
        payload: bytes, see `Traffic.payload`.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.payload: Counter[Transfer] = Counter()

    def note(self, kind: str, payload: Tensor) -> None:
        """Adds one collective."""
        self.payload[Transfer(kind, self.group_size)] += payload.numel() * payload.element_size()


class Traffic:
    """What was counted.

    Attributes:
        payload: bytes of tensors; the whole tensor that a collective gathers, reduces or scatters, on every
            rank.
        calls: number of operations.
        scalars: number of operations on at most `scalar_elements` elements, which are in none of the other
            two.
    """

    def __init__(self, scalar_elements: int) -> None:
        self.scalar_elements = scalar_elements
        self.payload: Counter[Transfer] = Counter()
        self.calls: Counter[Transfer] = Counter()
        self.scalars: Counter[Transfer] = Counter()

    def record(self, kind: str, group_size: int, payload: Tensor | Sequence[Tensor]) -> None:
        tensors = [payload] if isinstance(payload, Tensor) else payload
        transfer = Transfer(kind, group_size)
        if sum(tensor.numel() for tensor in tensors) <= self.scalar_elements:
            self.scalars[transfer] += 1
            return
        self.calls[transfer] += 1
        self.payload[transfer] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextlib.contextmanager
def count_traffic(scalar_elements: int = 0) -> Iterator[Traffic]:
    """Counts inside; the counts stay readable afterwards.

    Args:
        scalar_elements: operations on at most that many elements are counted apart.
    """
    traffic = Traffic(scalar_elements)
    backend = deepspeed.comm.comm.cdb
    counted = {name: _counted(name, getattr(dist, name), traffic) for name in _PAYLOAD}
    with contextlib.ExitStack() as stack:
        if backend is not None:
            batch = _counted_batch(backend.batch_isend_irecv, traffic)
            stack.enter_context(mock.patch.object(backend, "batch_isend_irecv", batch))
        for name, function in counted.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        for attribute, name in _KEPT_BY_DEEPSPEED.items() if backend is not None else ():
            stack.enter_context(mock.patch.object(backend, attribute, counted[name]))
        yield traffic


def _counted_batch(function: Callable[..., Any], traffic: Traffic) -> Callable[..., Any]:
    """Exchanges of a folded pipeline; torch accepts no other functions in them than its own isend and irecv."""
    own = {name: getattr(dist, name) for name in ("isend", "irecv")}

    def call(operations: Sequence[Any]) -> Any:
        for operation in operations:
            traffic.record(_KIND[operation.op], 2, operation.tensor)
        with mock.patch.multiple(dist, **own):
            return function(operations)

    return call


def _counted(name: str, function: Callable[..., Any], traffic: Traffic) -> Callable[..., Any]:
    signature = inspect.signature(function)
    kind = _KIND.get(name, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        group_size = 2 if kind in _PAIRWISE else dist.get_world_size(arguments.get("group"))
        if group_size > 1:
            traffic.record(kind, group_size, arguments[_PAYLOAD[name]])
        return function(*args, **kwargs)

    return call
