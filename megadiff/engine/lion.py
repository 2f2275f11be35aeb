"""Lion: the sign of an interpolated momentum, one state a parameter (Chen et al. 2023, algorithm 2)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megadiff.engine.group_optimizer import GroupOptimizer


class Lion(GroupOptimizer):
    """update = sign(beta1 m + (1 - beta1) g);  w -= lr (update + decay w);  m = beta2 m + (1 - beta2) g.

    Every element moves by the learning rate, so that it wants a rate 3 to 10 times below AdamW's and a weight decay as
    many times above.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "weight_decay": 0.0})

    def _step_group(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if "exp_avg" not in self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
        momenta = [self.state[param]["exp_avg"] for param in params]
        beta1, beta2 = group["betas"]
        updates = torch._foreach_lerp(momenta, grads, 1.0 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, grads, 1.0 - beta2)
