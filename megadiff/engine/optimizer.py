"""The optimizer and its learning rate. Both know nothing of ranks: DeepSpeed hands the optimizer what it owns."""

import math
from typing import Any

import torch
from torch import nn

from megadiff.config.schema import OptimizerConfig
from megadiff.engine.adamw_ema import AdamWEma
from megadiff.engine.lion import Lion
from megadiff.errors import ConfigError
from megadiff.models.chain import Chain
from megadiff.ops.library import Kernels
from megadiff.ops.rms_norm import require_apex

# The state tensors that an optimizer keeps for each parameter, which a checkpoint stores.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def state_keys(config: OptimizerConfig) -> tuple[str, ...]:
    """Names of the per-parameter state tensors of the chosen optimizer."""
    if config.name == "sgd":
        return ("momentum_buffer",) if config.momentum > 0 else ()
    if config.name == "lion":
        return _MOMENTS[:1]
    return _MOMENTS


def make_optimizer(config: OptimizerConfig, chain: Chain, kernels: Kernels = "auto") -> torch.optim.Optimizer:
    """The optimizer over this rank's parameters.

    Weight decay applies to matrices and convolutions, not to biases, norms and the label table. The learning rate
    starts at zero; `set_learning_rate` sets it before every step.
    """
    groups = _groups(config, chain)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum)
    if config.name == "lion":
        return Lion(groups, config.betas)
    if config.name == "adamw_ema":
        return AdamWEma(groups, config.betas, config.eps, kernels)
    if config.name == "apex_fused_adam":
        return _apex_fused_adam(groups, config)
    # On the CPU torch would loop over the parameters in Python by default; on CUDA its default takes them together.
    fused = True if all(p.device.type == "cpu" for p in chain.parameters()) else None
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=fused)


def _groups(config: OptimizerConfig, chain: Chain) -> list[dict[str, Any]]:
    """Parameters by weight decay and by the factor on their learning rate, in the order of their first parameter."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in chain.named_parameters():
        is_decayed = parameter.dim() >= 2 and name != "embed.label.weight"
        key = config.weight_decay if is_decayed else 0.0, _lr_ratio(config, name)
        groups.setdefault(key, []).append(parameter)
    return [{"params": params, "weight_decay": decay, "lr_ratio": ratio} for (decay, ratio), params in groups.items()]


def _lr_ratio(config: OptimizerConfig, name: str) -> float:
    """The factor on the learning rate of a parameter by where it lies in a UNet."""
    down, mid, up = config.path_lr_ratios
    match name.split(".")[0]:
        case "mid":
            return mid
        case "up" | "head":
            return up
    return down


def _apex_fused_adam(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    require_apex("optimizer.name = apex_fused_adam", "apex.optimizers")
    from apex.optimizers import FusedAdam

    # apex counts steps by group, but only from its first step on; a resume finds the counter only if it is there.
    counted = [{**group, "step": 0} for group in groups]
    try:
        return FusedAdam(counted, lr=0.0, betas=config.betas, eps=config.eps, adam_w_mode=True)
    except RuntimeError as error:
        raise ConfigError(
            f"optimizer.name = apex_fused_adam: this build of apex cannot run it ({error}); build apex with its CUDA "
            "extensions (APEX_CUDA_EXT=1) or use optimizer.name = adamw_ema"
        ) from error


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of an optimizer step, a function of optimizer steps alone.

    Linear warm-up reaches `lr` at step `warmup_steps - 1`; the cosine falls from there and reaches
    `lr * min_lr_ratio` at the last step. The last `final_fraction` of the steps (rounded to steps) are multiplied with
    `final_lr_ratio`.

    Args:
        step: optimizer step, counted from 0.
        total_steps: the horizon of the schedule (`train.steps`).
        config: rates and shape.
    """
    is_final = step >= total_steps - round(config.final_fraction * total_steps)
    return config.lr * _shape(step, total_steps, config) * (config.final_lr_ratio if is_final else 1.0)


def _shape(step: int, total_steps: int, config: OptimizerConfig) -> float:
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate in the very groups that the optimizer steps, times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_ratio"]


def count_parameters(module: nn.Module) -> int:
    """How many elements the parameters of a module have here."""
    return sum(parameter.numel() for parameter in module.parameters())
