"""Reuses what parts of a network gave when a picture's features there are almost those of an earlier call.

During sampling neighbouring calls differ little. Of a UNet the third level (or the coarsest, if there are fewer) is
reused together with all that lies within it, from its way down to its way up: what leaves it depends on nothing else
but what enters, so that one comparison decides, and no deeper level is reused by itself. Finer levels carry the noise,
which no call may miss; they always run. Of a DiT the first blocks always run and decide for the rest. A part's features
are compared by their cosine, for each position of the batch alone (a picture, and one of the two answers that guidance
weighs): pictures whose features are new go through it together. The others take the point of the line through the
part's two earlier results that is theirs on the line through the features of both, so that the error falls with the
square of the distance. Where a part keeps the shape of its features, the results are what it added to them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megadiff.config.networks import cached_level, deciding_blocks
from megadiff.config.schema import ModelConfig
from megadiff.models.chain import Chain, State

_ENTRIES = 2


@dataclass
class HitRate:
    """How often a part was not run.

    Attributes:
        hits, lookups: of positions of a batch at parts that may be reused.
    """

    hits: int = 0
    lookups: int = 0

    @property
    def share(self) -> float:
        return self.hits / self.lookups if self.lookups else 0.0


@dataclass(frozen=True)
class Part:
    """Consecutive layers.

    Attributes:
        run: their forward pass; what it passes through it returns as the same tensors.
        is_cached: whether its results are reused.
    """

    run: Callable[[State], State]
    is_cached: bool


class FeatureCache:
    """The forward pass of a network for the calls of one batch of pictures.

    Args:
        parts: of the network, in order.
        threshold: the cosine above which, strictly, a part's earlier results stand; 1 reuses nothing.
        rate: counts.
    """

    def __init__(self, parts: Sequence[Part], threshold: float, rate: HitRate) -> None:
        self._parts = parts
        self._memories = [_Memory() for _ in parts]
        self._threshold, self._rate = threshold, rate
        self._call = 0

    def __call__(self, state: State) -> Tensor:
        """The network's output for (x_t, t, labels); position i must be of the same picture at every call."""
        self._call += 1
        for part, memory in zip(self._parts, self._memories, strict=True):
            state = self._run_cached(part, memory, state) if part.is_cached else part.run(state)
        return state  # type: ignore[return-value]  # the last part gives the output alone

    def _run_cached(self, part: Part, memory: "_Memory", state: State) -> State:
        features = state[0]
        slots = memory.find(features, self._threshold, self._call)  # -1 where nothing is near enough
        is_new = slots < 0
        new = is_new.nonzero().flatten()
        self._rate.lookups += len(slots)
        self._rate.hits += len(slots) - len(new)
        if len(new):
            everything = len(new) == len(slots)
            entering = state if everything else tuple(tensor[new] for tensor in state)
            result = part.run(entering)
            memory.learn_routes(entering, result)
            fresh = memory.reduced(entering[0], result)
            memory.store(new, len(slots), entering[0], fresh, self._call)
            if everything:
                return result
        else:
            fresh = []
        return memory.assemble(state, slots, new, fresh)


@dataclass
class _Slot:
    """One result for each position: features that entered, what came out, and the call of its last use (0: empty)."""

    features: Tensor
    outputs: list[Tensor]
    norms: Tensor
    used: Tensor


@dataclass
class _Memory:
    """The results of one part.

    Attributes:
        slots: up to two results a position; the one not used for longest makes room.
        routes: for each output of the part the place of the input that it passes through, or None.
        is_added: whether the first output is kept as the difference to the features.
    """

    slots: list[_Slot] = field(default_factory=list)
    routes: list[int | None] = field(default_factory=list)
    is_added: bool = False

    def find(self, features: Tensor, threshold: float, call: int) -> Tensor:
        """The slot of each position whose features are nearest, if near enough, else -1; (B,) int64."""
        best = torch.full((len(features),), threshold, dtype=torch.float32, device=features.device)
        found = torch.full((len(features),), -1, dtype=torch.int64, device=features.device)
        if threshold >= 1.0 or not self.slots:
            return found
        count = min(len(features), len(self.slots[0].used))  # a call without the second answer of guidance is shorter
        norms = _norms(features)
        for number, slot in enumerate(self.slots):
            products = (features[:count].float() * slot.features[:count].float()).flatten(1).sum(1)
            cosines = products / (norms[:count] * slot.norms[:count]).clamp(min=torch.finfo(torch.float32).tiny)
            is_better = (slot.used[:count] > 0) & (cosines > best[:count])
            best[:count] = torch.where(is_better, cosines, best[:count])
            found[:count] = torch.where(is_better, number, found[:count])
        for number, slot in enumerate(self.slots):
            slot.used[:count][found[:count] == number] = call
        return found

    def learn_routes(self, entering: State, result: State) -> None:
        """Notes which outputs are inputs that the part passes through, and whether the first keeps its shape."""
        places = {id(tensor): place for place, tensor in enumerate(entering)}
        self.routes = [places.get(id(tensor)) for tensor in result]
        self.is_added = result[0].shape == entering[0].shape

    def reduced(self, features: Tensor, result: State) -> list[Tensor]:
        """What is worth keeping of a result."""
        own = [tensor for tensor, route in zip(result, self.routes, strict=True) if route is None]
        return [own[0] - features, *own[1:]] if self.is_added else own

    def store(self, positions: Tensor, batch: int, features: Tensor, outputs: list[Tensor], call: int) -> None:
        """Keeps results of some positions of a batch, each in an empty slot or in place of its least used one."""
        ages = self._ages(batch, features.device)[positions]
        if len(self.slots) < _ENTRIES and bool((ages > 0).all(1).any()):
            self.slots.append(_empty_slot(self._size(batch), features, outputs))
            ages = self._ages(batch, features.device)[positions]
        target = ages.argmin(1)
        norms = _norms(features)
        for number, slot in enumerate(self.slots):
            mine = (target == number).nonzero().flatten()
            at = positions[mine]
            slot.features[at], slot.norms[at], slot.used[at] = features[mine], norms[mine], call
            for kept, output in zip(slot.outputs, outputs, strict=True):
                kept[at] = output[mine]

    def assemble(self, state: State, slots: Tensor, new: Tensor, fresh: list[Tensor]) -> State:
        """The part's output for the whole batch, of kept and fresh results."""
        old = (slots >= 0).nonzero().flatten()
        along = self._along(state[0], slots, old)
        own = []
        for place in range(len(self.slots[0].outputs)):
            near, far = self._near_and_far([slot.outputs[place] for slot in self.slots], slots, old)
            whole = near.new_empty(len(slots), *near.shape[1:])
            if whole.ndim == 4:
                whole = whole.to(memory_format=torch.channels_last)
            whole[old] = near + _over(along, near) * (near - far)
            if len(new):
                whole[new] = fresh[place]
            own.append(whole)
        if self.is_added:
            own[0] = own[0] + state[0]
        rest = iter(own)
        return tuple(next(rest) if route is None else state[route] for route in self.routes)

    def _along(self, features: Tensor, slots: Tensor, old: Tensor) -> Tensor:
        """How far the features of some positions lie on the line from the far entry through the near one; float32.

        0 at the near entry, -1 at the far one and at most 1 beyond; 0 also where there is but one.
        """
        near, far = self._near_and_far([slot.features for slot in self.slots], slots, old)
        _, used = self._near_and_far([slot.used for slot in self.slots], slots, old)
        line = (near.float() - far.float()).flatten(1)
        moved = (features[old].float() - near.float()).flatten(1)
        along = (moved * line).sum(1) / line.square().sum(1).clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(used > 0, along.clamp(-1, 1), 0)

    @staticmethod
    def _near_and_far(kept: list[Tensor], slots: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Of what each slot keeps at some positions, that of the slot found and that of the other, if there is one."""
        first, last = kept[0][old], kept[-1][old]
        is_last = _over(slots[old] > 0, first)
        return torch.where(is_last, last, first), torch.where(is_last, first, last)

    def _ages(self, batch: int, device: torch.device) -> Tensor:
        """(B, slots) calls of the last use, 0 where a slot is empty; slots grow with the largest batch."""
        size = self._size(batch)
        for slot in self.slots:
            _grow(slot, size)
        if not self.slots:
            return torch.ones(size, 1, dtype=torch.int64, device=device)
        return torch.stack([slot.used for slot in self.slots], dim=1)

    def _size(self, batch: int) -> int:
        return max([batch, *(len(slot.used) for slot in self.slots)])


def cached_parts(chain: Chain, model: ModelConfig) -> list[Part]:
    """A whole network as parts, which share its layers."""
    groups: list[tuple[str | None, list[str]]] = []
    for name in chain.layer_names:
        group = _group_of(name, model)
        if not groups or groups[-1][0] != group:
            groups.append((group, []))
        groups[-1][1].append(name)
    return [Part(chain.part(names, skips_stay=False), group is not None) for group, names in groups]


def _group_of(name: str, model: ModelConfig) -> str | None:
    """What a layer is reused together with; None if it always runs."""
    kind, number = (*name.split("."), "")[:2]
    if kind == "blocks":
        return "blocks" if int(number) >= deciding_blocks(model) else None
    is_inside = kind == "mid" or (kind in ("down", "up") and int(number) >= cached_level(model))
    return "levels" if is_inside else None


def _over(values: Tensor, like: Tensor) -> Tensor:
    """(B,) values that multiply or choose (B, ...) tensors, in their dtype unless they are truths."""
    values = values if values.dtype == torch.bool else values.to(like.dtype)
    return values.view(-1, *[1] * (like.ndim - 1))


def _norms(features: Tensor) -> Tensor:
    return features.float().flatten(1).norm(dim=1)


def _empty_slot(size: int, features: Tensor, outputs: list[Tensor]) -> _Slot:
    kept = [_room(size, tensor) for tensor in (features, *outputs)]
    used = torch.zeros(size, dtype=torch.int64, device=features.device)
    return _Slot(kept[0], kept[1:], torch.zeros(size, device=features.device), used)


def _room(size: int, like: Tensor) -> Tensor:
    room = like.new_zeros(size, *like.shape[1:])
    return room.to(memory_format=torch.channels_last) if room.ndim == 4 else room


def _grow(slot: _Slot, size: int) -> None:
    if len(slot.used) < size:
        grown = _empty_slot(size, slot.features, slot.outputs)
        count = len(slot.used)
        grown.features[:count], grown.norms[:count], grown.used[:count] = slot.features, slot.norms, slot.used
        for larger, smaller in zip(grown.outputs, slot.outputs, strict=True):
            larger[:count] = smaller
        slot.features, slot.outputs, slot.norms, slot.used = grown.features, grown.outputs, grown.norms, grown.used
