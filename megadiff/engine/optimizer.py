"""The optimizer and its learning rate. Both know nothing of ranks: DeepSpeed hands the optimizer what it owns."""

import math
from typing import Any

import torch
from torch import nn

from megadiff.config.schema import OptimizerConfig
from megadiff.engine.adamw_ema import AdamWEma
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
    return _MOMENTS


def make_optimizer(config: OptimizerConfig, chain: Chain, kernels: Kernels = "auto") -> torch.optim.Optimizer:
    """The optimizer over this rank's parameters.

    Weight decay applies to matrices and convolutions, not to biases, norms and the label table. The learning rate
    starts at zero; `set_learning_rate` sets it before every step.
    """
    decayed = [p for name, p in chain.named_parameters() if p.dim() >= 2 and name != "embed.label.weight"]
    taken = {id(p) for p in decayed}
    plain = [p for p in chain.parameters() if id(p) not in taken]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum)
    if config.name == "adamw_ema":
        return AdamWEma(groups, config.betas, config.eps, kernels)
    if config.name == "apex_fused_adam":
        return _apex_fused_adam(groups, config)
    # On the CPU torch would loop over the parameters in Python by default; on CUDA its default takes them together.
    fused = True if all(p.device.type == "cpu" for p in chain.parameters()) else None
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=fused)


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
    `lr * min_lr_ratio` at the last step.

    Args:
        step: optimizer step, counted from 0.
        total_steps: the horizon of the schedule (`train.steps`).
        config: rates and shape.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate in the very groups that the optimizer steps."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def count_parameters(module: nn.Module) -> int:
    """How many elements the parameters of a module have here."""
    return sum(parameter.numel() for parameter in module.parameters())
