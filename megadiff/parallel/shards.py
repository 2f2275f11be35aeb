"""The one view of distributed state: which part of each logical parameter this rank owns, and where it lives.

Tensor parallelism gives a rank a box of the full parameter; ZeRO gives it a flat range of that box (row-major). The
owned values in full precision, and the optimizer's state for them, are one-dimensional tensors of that range's length.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadiff.dist.grid import Axis, Grid
from megadiff.models.chain import Chain
from megadiff.parallel.plan import Sharding


@dataclass(frozen=True)
class Shard:
    """This rank's part of one logical parameter.

    Attributes:
        name: global name.
        parameter: the tensor that the network computes with.
        full_shape: shape of the logical parameter.
        offset, size: the box that this rank's tensor-parallel slice is of the full parameter.
        start, stop: the flat range of the box that this rank owns; empty where ZeRO gave it to others.
        master: the owned values, 1-D, float32 or float64; writing into it is what an optimizer step does.
        flat: the tensor that the optimizer steps, which holds `master` from `flat_start` on; None if nothing is owned.
        is_copy: True where another rank owns the same values, so that a checkpoint needs them from one of both.
    """

    name: str
    parameter: nn.Parameter
    full_shape: torch.Size
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    stop: int
    master: Tensor
    flat: Tensor | None
    flat_start: int
    is_copy: bool

    @property
    def numel(self) -> int:
        """How many elements this rank owns."""
        return self.stop - self.start


class Shards:
    """All shards of this rank under one DeepSpeed engine."""

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, chain: Chain, sharding: Sharding, grid: Grid, zero: int
    ) -> None:
        """Reads where DeepSpeed keeps what.

        Args:
            engine: as `deepspeed.initialize` returned it.
            chain: this rank's layers.
            sharding: how the plan cut them.
            grid: the layout.
            zero: the ZeRO stage.
        """
        self.zero, self.grid = zero, grid
        self.optimizer: torch.optim.Optimizer = engine.optimizer if zero == 0 else engine.optimizer.optimizer
        locate = {0: _locate_whole, 1: _locate_mapped, 2: _locate_mapped, 3: _locate_zero3}[zero]
        self.all = [
            _shard(name, parameter, sharding, grid, index, zero, lambda p: locate(p, grid.data, self.optimizer))
            for index, (name, parameter) in enumerate(chain.named_parameters())
        ]
        self.by_name = {shard.name: shard for shard in self.all}

    def optimizer_state(self, shard: Shard, key: str) -> Tensor:
        """The optimizer's state tensor `key` for a shard, 1-D of the shard's length; a view."""
        if shard.flat is None:
            return shard.master
        return self.optimizer.state[shard.flat][key].view(-1).narrow(0, shard.flat_start, shard.numel)

    def ensure_optimizer_state(self, keys: tuple[str, ...]) -> None:
        """Makes zero state tensors where the optimizer has not stepped yet."""
        for shard in self.all:
            if shard.flat is None or shard.flat in self.optimizer.state:
                continue
            state = {key: torch.zeros_like(shard.flat) for key in keys}
            self.optimizer.state[shard.flat] = {"step": torch.zeros(()), **state} if keys else {}

    def has_optimizer_state(self, keys: tuple[str, ...]) -> bool:
        """True if every shard that is owned here has the state tensors `keys`."""
        states = [self.optimizer.state.get(shard.flat, {}) for shard in self.all if shard.flat is not None]
        return all(key in state for state in states for key in keys)

    def set_optimizer_steps(self, steps: int) -> None:
        """Sets the optimizer's own step counters, where it keeps them: a parameter's (torch) or a group's (apex)."""
        for group in self.optimizer.param_groups:
            if "step" in group:
                group["step"] = steps
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(steps))

    @torch.no_grad()
    def publish(self, values: Mapping[str, Tensor]) -> None:
        """Makes the network compute with these values; a collective call over the data ranks.

        Args:
            values: global name -> 1-D values of this rank's range, in the master's dtype.
        """
        for shard in self.all:
            full = self.assemble(shard, values[shard.name])
            if self.zero == 3:
                with deepspeed.zero.GatheredParameters([shard.parameter], modifier_rank=0):
                    shard.parameter.data.copy_(full)
            else:
                shard.parameter.data.copy_(full)

    def assemble(self, shard: Shard, values: Tensor) -> Tensor:
        """The values of a parameter's whole tensor-parallel slice from the ranges of the data ranks, bit for bit."""
        if self.zero == 0:
            return values.view(shard.size)
        numel = torch.Size(shard.size).numel()
        device = shard.parameter.device
        full = torch.zeros(numel, dtype=values.dtype, device=device)
        full[shard.start : shard.stop] = values.to(device)
        if self.grid.data.degree > 1:  # as integers, so that not even the sign of a zero changes
            dist.all_reduce(full.view(torch.int32), group=self.grid.data.group)
        return full.view(shard.size)


_Place = tuple[int, int, Tensor, Tensor | None, int]  # start, stop, master, flat, flat_start
_Locate = Callable[[nn.Parameter], _Place]


def _shard(
    name: str, parameter: nn.Parameter, sharding: Sharding, grid: Grid, index: int, zero: int, locate: _Locate
) -> Shard:
    cut = sharding.slices.get(name)
    shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO 3 empties the parameter itself
    copied_by_data = zero == 0 and grid.data.index != index % grid.data.degree
    copied_by_tensor = cut is None and grid.tensor.index != 0
    start, stop, master, flat, flat_start = locate(parameter)
    return Shard(
        name=name,
        parameter=parameter,
        full_shape=shape if cut is None else cut.full_shape,
        offset=(0,) * len(shape) if cut is None else cut.offset,
        size=tuple(shape),
        start=start,
        stop=stop,
        master=master,
        flat=flat,
        flat_start=flat_start,
        is_copy=copied_by_data or copied_by_tensor,
    )


def _nothing(parameter: nn.Parameter) -> _Place:
    return 0, 0, torch.empty(0, dtype=torch.float32, device=parameter.device), None, 0


def _locate_whole(parameter: nn.Parameter, data: Axis, optimizer: torch.optim.Optimizer) -> _Place:
    return 0, parameter.numel(), parameter.data.view(-1), parameter, 0


def _locate_mapped(parameter: Any, data: Axis, optimizer: torch.optim.Optimizer) -> _Place:
    """ZeRO 1 and 2: the range that `_hp_mapping` names, which is None where this rank owns nothing of the parameter."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return _nothing(parameter)
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    (flat,) = optimizer.param_groups[mapping.param_group_index]["params"]
    return low.start, low.start + low.numel, flat.data.narrow(0, high.start, high.numel), flat, high.start


def _locate_zero3(parameter: Any, data: Axis, optimizer: torch.optim.Optimizer) -> _Place:
    """ZeRO 3: equal parts over the data ranks, the last ones padded."""
    zero3 = parameter._z3_optimizer
    group, position, part = zero3.grad_position[zero3.get_param_id(parameter)]
    start = min(data.index * part, parameter.ds_numel)
    stop = min(start + part, parameter.ds_numel)
    if start == stop:
        return _nothing(parameter)
    flat = zero3.fp32_partitioned_groups_flat[group]
    return start, stop, flat.data.narrow(0, position, stop - start), flat, position
