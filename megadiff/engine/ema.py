"""Exponential moving average of the weights, in full precision, sharded exactly as the optimizer is."""

import torch
from torch import Tensor

from megadiff.config.schema import EmaConfig
from megadiff.parallel.shards import Shards


def ema_decay(num_updates: int, config: EmaConfig) -> float:
    """The decay of the next update after `num_updates` ones.

    With warm-up min(decay, (1 + n) / (10 + n)), so that an early average is not ruled by the initial weights.
    """
    return min(config.decay, (1 + num_updates) / (10 + num_updates)) if config.warmup else config.decay


class Ema:
    """The moving average of the values that this rank owns; needs no communication.

    Attributes:
        values: global parameter name -> 1-D values, float32 (float64 where the weights are).
        num_updates: updates so far, one an applied optimizer step.
    """

    def __init__(self, config: EmaConfig, shards: Shards) -> None:
        """Starts from the current weights."""
        self.config = config
        self.shards = shards
        self.num_updates = 0
        self.values: dict[str, Tensor] = {shard.name: shard.master.detach().clone() for shard in shards.all}

    @torch.no_grad()
    def update(self) -> None:
        """One step: values += (1 - decay) (weights - values)."""
        weight = 1.0 - ema_decay(self.num_updates, self.config)
        owned = [shard for shard in self.shards.all if shard.numel]
        torch._foreach_lerp_([self.values[s.name] for s in owned], [s.master.detach() for s in owned], weight)
        self.num_updates += 1
