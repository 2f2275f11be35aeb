"""The optimizer and its learning rate. Both know nothing of ranks: DeepSpeed hands the optimizer what it owns."""

import math

import torch
from torch import nn

from megadiff.config.schema import OptimizerConfig
from megadiff.models.chain import Chain

# The state tensors that an optimizer keeps for each parameter, which a checkpoint stores.
_STATE_KEYS: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}


def state_keys(config: OptimizerConfig) -> tuple[str, ...]:
    """Names of the per-parameter state tensors of the chosen optimizer."""
    if config.name == "sgd" and config.momentum > 0:
        return ("momentum_buffer",)
    return _STATE_KEYS[config.name]


def make_optimizer(config: OptimizerConfig, chain: Chain) -> torch.optim.Optimizer:
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
    # On the CPU torch would loop over the parameters in Python by default; on CUDA its default takes them together.
    fused = True if all(p.device.type == "cpu" for p in chain.parameters()) else None
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=fused)


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
