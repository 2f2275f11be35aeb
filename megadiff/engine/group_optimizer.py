"""What our optimizers share: torch's interface, a step group by group, no closure."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GroupOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose groups are stepped one after the other; DeepSpeed computes the gradients before."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient.

        Raises:
            TypeError: with a closure, which would compute the gradients anew.
        """
        if closure is not None:
            raise TypeError(f"{type(self).__name__}.step takes no closure; compute the gradients before it")
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step_group(params, [param.grad for param in params], group)

    @abstractmethod
    def _step_group(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """Steps some parameters, at least one, of a group by their gradients."""
