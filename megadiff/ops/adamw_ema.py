"""AdamW (Loshchilov and Hutter 2019) and the moving average of the weights in one pass over flat shards, in place."""

import math

import torch
from torch import Tensor

from megadiff.ops.library import Kernels, use_kernel


def adamw_ema_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    ema: Tensor | None,
    low: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    ema_weight: float = 0.0,
    grad_scale: float = 1.0,
    kernels: Kernels = "auto",
) -> None:
    """One optimizer step: g = grad_scale grad, AdamW, then ema += ema_weight (param - ema) and low = param.

    Args:
        param, grad, exp_avg, exp_avg_sq: of one shape, float32 (float64 takes the reference).
        ema: the moving average, like param, or None.
        low: a copy of the new weights in float32, bf16 or fp16, or None.
        lr, betas, eps, weight_decay: of AdamW; the decay is decoupled.
        step: counts from 1, for the bias corrections.
        ema_weight: 1 - decay.
        grad_scale: factor of the gradient, for example of clipping or of a loss scale.
        kernels: whether the fused kernel may run.
    """
    if param.dtype != torch.float32 or not use_kernel("adamw_ema", kernels, param):
        _reference(
            param, grad, exp_avg, exp_avg_sq, ema, low, lr, betas, eps, weight_decay, step, ema_weight, grad_scale
        )
        return
    torch.ops.megadiff.adamw_ema_(
        param, grad, exp_avg, exp_avg_sq, ema, low, lr, *betas, eps, weight_decay, step, ema_weight, grad_scale
    )


@torch.no_grad()
def _reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    ema: Tensor | None,
    low: Tensor | None,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    ema_weight: float,
    grad_scale: float,
) -> None:
    scaled = grad * grad_scale
    exp_avg.lerp_(scaled, 1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(scaled, scaled, value=1 - betas[1])
    root = (exp_avg_sq.sqrt() / math.sqrt(1 - betas[1] ** step)).add_(eps)
    param.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, root, value=-lr / (1 - betas[0] ** step))
    if ema is not None:
        ema.lerp_(param, ema_weight)
    if low is not None:
        low.copy_(param)


def register(library: str) -> None:
    """Tells torch that the operator of `torch.ops.<library>` returns nothing."""
    torch.library.register_fake(f"{library}::adamw_ema_", _fake)


def _fake(*args: object) -> None:
    return None
