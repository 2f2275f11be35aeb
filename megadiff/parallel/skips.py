"""Long skips that stay on their rank in a folded pipeline, instead of travelling with the state.

The first half of the network leaves them here and the second half, on the same rank, takes them; their gradients go the
other way. Micro-batches pass both halves in the same order, forward and backward, so two queues are enough.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor


class SkipStore:
    """The skips of the micro-batches between a stage and its mirror image, oldest first."""

    def __init__(self) -> None:
        self.values: deque[tuple[Tensor, ...]] = deque()
        self.gradients: deque[tuple[Tensor, ...]] = deque()

    def leave(self, state: tuple[Tensor, ...], skips: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Leaves skips; the state that goes on hands their gradients to them when its own arrives."""
        first: Tensor = _Leave.apply(self, state[0], *skips)
        return (first, *state[1:])

    def take(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The state with the skips that were left for it at its end."""
        first, *skips = _Take.apply(self, state[0])
        return (first, *state[1:], *skips)

    @property
    def is_empty(self) -> bool:
        """True between steps: every skip was taken, and every gradient."""
        return not self.values and not self.gradients


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, store: SkipStore, x: Tensor, *skips: Tensor) -> Tensor:
        ctx.store = store
        store.values.append(tuple(skip.detach() for skip in skips))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, grad, *ctx.store.gradients.popleft()


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, store: SkipStore, x: Tensor) -> tuple[Tensor, ...]:
        ctx.store = store
        return (x.view_as(x), *store.values.popleft())

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *skip_grads: Tensor) -> tuple[None, Tensor]:
        ctx.store.gradients.append(skip_grads)
        return None, grad
