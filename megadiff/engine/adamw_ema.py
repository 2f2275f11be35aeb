"""AdamW that keeps the moving average of the weights in the same pass over its flat shards."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megadiff.engine.group_optimizer import GroupOptimizer
from megadiff.ops.adamw_ema import adamw_ema_
from megadiff.ops.library import Kernels


class AdamWEma(GroupOptimizer):
    """AdamW (Loshchilov and Hutter 2019) by the fused operator, with the states of torch's AdamW.

    Attributes:
        averages: parameter -> its moving average, updated with each step; empty without one.
        ema_weight: 1 - decay of the next step, set before it.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        kernels: Kernels,
    ) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.kernels: Kernels = kernels
        self.averages: dict[Tensor, Tensor] = {}
        self.ema_weight = 0.0

    def _step_group(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        for param, grad in zip(params, grads, strict=True):
            self._step_parameter(param, grad, group)

    def _step_parameter(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
        state["step"] += 1
        adamw_ema_(
            param,
            grad.contiguous(),
            state["exp_avg"],
            state["exp_avg_sq"],
            self.averages.get(param),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=int(state["step"]),
            ema_weight=self.ema_weight,
            kernels=self.kernels,
        )
