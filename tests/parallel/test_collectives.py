"""Each collective against its closed form, forward and backward, on two ranks that hold different numbers."""

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.dist.grid import Axis
from megadiff.parallel import collectives
from tests.pool import WorkerPool

SHAPE = (2, 4, 6)  # (B, N, D); every rank's own part where tokens or columns are sharded


def value(rank: int, kind: str, shape: tuple[int, ...]) -> Tensor:
    """An input or an incoming gradient of one rank; small integers, so that sums are exact."""
    seed = rank * 100 + len(kind)
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def run_collective(name: str, arguments: tuple[object, ...], gradient_shape: tuple[int, ...]) -> list[Tensor]:
    """Output and gradient of a collective on this rank."""
    rank = dist.get_rank()
    axis = Axis(2, rank, (0, 1), dist.group.WORLD)
    x = value(rank, "x", SHAPE).requires_grad_()
    output = getattr(collectives, name)(x, axis, *arguments)
    output.backward(value(rank, "gradient", gradient_shape))
    return [output.detach(), x.grad]


def _joined(parts: list[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat(parts, dim)] * 2


def _summed(parts: list[Tensor]) -> list[Tensor]:
    return [parts[0] + parts[1]] * 2


def _scattered(parts: list[Tensor], dim: int) -> list[Tensor]:
    return list((parts[0] + parts[1]).chunk(2, dim))


def _own(parts: list[Tensor], dim: int) -> list[Tensor]:
    return [part.chunk(2, dim)[rank] for rank, part in enumerate(parts)]


def _same(parts: list[Tensor]) -> list[Tensor]:
    return parts


Rule = Callable[[list[Tensor]], list[Tensor]]
FULL, HALF, WIDE, DOUBLE = SHAPE, (2, 2, 6), (2, 4, 12), (2, 8, 6)
CASES: dict[str, tuple[str, tuple[object, ...], tuple[int, ...], Rule, Rule]] = {
    "copy": ("copy_to_region", (), FULL, _same, _summed),
    "reduce": ("reduce_from_region", (), FULL, _summed, _same),
    "gather": ("gather_tokens", (), DOUBLE, lambda p: _joined(p, 1), lambda p: _scattered(p, 1)),
    "scatter": ("reduce_scatter_tokens", (), HALF, lambda p: _scattered(p, 1), lambda p: _joined(p, 1)),
    "split": ("split_tokens", (), HALF, lambda p: _own(p, 1), lambda p: _joined(p, 1)),
    "join": ("join_tokens", (), DOUBLE, lambda p: _joined(p, 1), lambda p: _own(p, 1)),
    "columns": ("join_columns", (-1, False), WIDE, lambda p: _joined(p, -1), lambda p: _own(p, -1)),
    "partial": ("join_columns", (-1, True), WIDE, lambda p: _joined(p, -1), lambda p: _scattered(p, -1)),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_equal_the_closed_form(pools: Mapping[int, WorkerPool], case: str) -> None:
    name, arguments, gradient_shape, forward, backward = CASES[case]
    results = pools[2].run(run_collective, name=name, arguments=arguments, gradient_shape=gradient_shape)
    outputs = forward([value(rank, "x", SHAPE) for rank in range(2)])
    gradients = backward([value(rank, "gradient", gradient_shape) for rank in range(2)])
    for rank, (output, gradient) in enumerate(results):
        assert torch.equal(output, outputs[rank])
        assert torch.equal(gradient, gradients[rank])
