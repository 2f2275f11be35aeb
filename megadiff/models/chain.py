"""A network as an ordered chain of named layers, of which any subset can be built.

Every layer maps a state (a tensor or a tuple of tensors) to a state. Parameter names are global: a pipeline stage
that builds only `blocks.17` names its weights `blocks.17.attn.q.weight`, as the whole network does.

A long skip hands the first tensor of the state after one layer to a later layer, as the last tensor of its state. Skips
that enter or leave a chain, because the layer at their other end is not in it, stand at the end of its state.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

State = Tensor | tuple[Tensor, ...]
Builder = Callable[[], nn.Module]
Recompute = Literal["none", "full", "selective"]
_NO_SKIPS: Mapping[str, str] = MappingProxyType({})

# Outputs of these are kept by selective checkpointing; the cheap element-wise rest is computed again.
_KEPT_OPERATORS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


class Chain(nn.Module):
    """An ordered chain of layers.

    Args:
        builders: layer name -> function that makes the layer, in order. A dotted name such as `blocks.3` nests.
        only: the names to build, or None for all of them. The order is always that of `builders`.
        skips: long skips, as name of the layer that takes one -> name of the earlier layer that it comes from.

    Attributes:
        layer_names: the names that are built here, in order.
        start: the first layer of the whole network.
        incoming: the layers whose skips stand at the end of the state that enters, in the order of the chain.
        dropout_seeds: one integer a forward pass, set by whoever runs a network that has dropout. Each layer then
            seeds its masks from that integer and its own global position, so that a pipeline stage or a recomputation
            draws the masks that the whole chain would have drawn. None leaves torch's generator alone.
    """

    def __init__(
        self,
        builders: Mapping[str, Builder],
        only: Collection[str] | None = None,
        skips: Mapping[str, str] = _NO_SKIPS,
    ) -> None:
        super().__init__()
        self.skips, self.sources = skips, frozenset(skips.values())
        self.positions = {name: index for index, name in enumerate(builders)}
        unknown = set(only or ()) - set(builders)
        if unknown:
            raise KeyError(f"the chain has no layers named {sorted(unknown)}")
        self.layer_names = tuple(name for name in builders if only is None or name in only)
        self.dropout_seeds: Iterator[int] | None = None
        self.recompute: Recompute = "none"
        self.recompute_every = 1
        self.start = next(iter(builders))
        self.incoming = self._crossing_skips()
        for name in self.layer_names:
            self._attach(name, builders[name]())

    def part(self, names: Collection[str], skips_stay: bool) -> "Chain":
        """A chain of some of these layers, which it shares.

        Args:
            names: consecutive layers.
            skips_stay: a skip enters the part only if it is taken there; others do not pass through it.
        """
        part = Chain({name: functools.partial(self.layer, name) for name in self.positions}, names, self.skips)
        part.set_recompute(self.recompute, self.recompute_every)
        own = {part.skips[name] for name in part.layer_names if name in part.skips}
        part.incoming = tuple(name for name in part._crossing_skips() if name in own or not skips_stay)
        return part

    def _crossing_skips(self) -> tuple[str, ...]:
        """Layers before the first one here whose skip is taken here or later."""
        first = self.positions[self.layer_names[0]] if self.layer_names else 0
        sources = [
            source for taker, source in self.skips.items() if self.positions[source] < first <= self.positions[taker]
        ]
        return tuple(sorted(sources, key=lambda name: self.positions[name]))

    def _attach(self, name: str, layer: nn.Module) -> None:
        *parents, leaf = name.split(".")
        owner: nn.Module = self
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, nn.ModuleDict())
            owner = owner.get_submodule(parent)
        owner.add_module(leaf, layer)

    def layer(self, name: str) -> nn.Module:
        """The layer of that name; it must be built here."""
        return self.get_submodule(name)

    def set_recompute(self, mode: Recompute, every: int = 1) -> None:
        """Chooses what the backward pass computes again.

        Args:
            mode: `none` keeps all activations; `full` keeps the inputs of segments only; `selective` keeps the outputs
                of matrix products and attention inside each segment.
            every: how many consecutive blocks make one segment.
        """
        self.recompute, self.recompute_every = mode, every

    def compile_blocks(self) -> None:
        """Compiles each block (a layer with a dotted name) by itself, so that equal blocks share one compilation."""
        for name in self.layer_names:
            if "." in name:
                self.layer(name).compile()

    def segments(self) -> list[tuple[str, ...]]:
        """The layers in groups: consecutive blocks in groups of `recompute_every`, every other layer alone.

        A skip is taken at the start of a group and given at its end.
        """
        groups: list[tuple[str, ...]] = []
        for name in self.layer_names:
            full = groups and (len(groups[-1]) >= self.recompute_every or groups[-1][-1] in self.sources)
            if groups and not full and name not in self.skips and "." in name and "." in groups[-1][0]:
                groups[-1] += (name,)
            else:
                groups.append((name,))
        return groups

    def forward(self, state: State) -> State:
        """Runs the layers that are built here, in order."""
        seed = next(self.dropout_seeds) if self.training and self.dropout_seeds is not None else None
        held: dict[str, Tensor] = {}
        if self.incoming:
            count = len(self.incoming)
            held, state = dict(zip(self.incoming, state[-count:], strict=True)), state[:-count]
        for names in self.segments():
            if names[0] in self.skips:
                state = (*state, held.pop(self.skips[names[0]]))
            if self.recompute != "none" and "." in names[0] and torch.is_grad_enabled():
                state = self._checkpointed(names, seed, state)
            else:
                state = self._run(names, seed, state)
            if names[-1] in self.sources:
                held[names[-1]] = state[0]
        return (*state, *held.values()) if held else state

    def _run(self, names: tuple[str, ...], seed: int | None, state: State) -> State:
        for name in names:
            if seed is not None:
                torch.manual_seed(mix_seed(seed, self.positions[name]))
            state = self.layer(name)(state)
        return state

    def _checkpointed(self, names: tuple[str, ...], seed: int | None, state: State) -> State:
        if self.recompute == "full":
            return checkpoint(self._run, names, seed, state, use_reentrant=False)
        return checkpoint(self._run, names, seed, state, use_reentrant=False, context_fn=_selective_contexts)


def _selective_contexts():  # type: ignore[no-untyped-def]  # torch leaves its own context types unnamed
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(ctx: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def mix_seed(*parts: int) -> int:
    """One well-spread 63-bit seed from several integers (the finaliser of SplitMix64, Steele et al. 2014)."""
    value = 0
    for part in parts:
        value = (value * 0x9E3779B97F4A7C15 + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1
