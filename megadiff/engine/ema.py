"""Exponential moving average of the weights, in full precision, sharded exactly as the optimizer is."""

import torch
from torch import Tensor

from megadiff.config.schema import EmaConfig
from megadiff.engine.adamw_ema import AdamWEma
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
        # The optimizer that averages as it steps, or None where `update` makes a pass of its own.
        self.optimizer = shards.optimizer if isinstance(shards.optimizer, AdamWEma) else None
        if self.optimizer is None:
            self.values: dict[str, Tensor] = {shard.name: shard.master.detach().clone() for shard in shards.all}
        else:
            self.values = _values_in(self.optimizer, shards)

    def prepare(self) -> None:
        """Before an optimizer step: tells an optimizer that averages the weight of the new values."""
        if self.optimizer is not None:
            self.optimizer.ema_weight = self._weight()

    @torch.no_grad()
    def update(self) -> None:
        """After an applied step: values += (1 - decay) (weights - values), unless the optimizer has done it."""
        if self.optimizer is None:
            owned = [shard for shard in self.shards.all if shard.numel]
            masters = [shard.master.detach() for shard in owned]
            torch._foreach_lerp_([self.values[shard.name] for shard in owned], masters, self._weight())
        self.num_updates += 1

    def _weight(self) -> float:
        return 1.0 - ema_decay(self.num_updates, self.config)


def _values_in(optimizer: AdamWEma, shards: Shards) -> dict[str, Tensor]:
    """Averages beside the flat tensors that the optimizer steps; a shard's values are its range of one of them."""
    flats = {id(shard.flat): shard.flat for shard in shards.all if shard.flat is not None}
    optimizer.averages = {flat: flat.detach().clone() for flat in flats.values()}
    values = {}
    for shard in shards.all:
        if shard.flat is None:
            values[shard.name] = shard.master.detach().clone()
        else:
            average = optimizer.averages[shard.flat].view(-1)
            values[shard.name] = average.narrow(0, shard.flat_start, shard.numel)
    return values
