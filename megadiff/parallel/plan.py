"""Tensor parallelism as data: a table of name patterns says how each module is sharded, and one function applies it.

In a pattern `*` stands for one name between dots and `[abc]` for one letter.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megadiff.dist.grid import Axis
from megadiff.errors import PlanError
from megadiff.models.chain import Chain
from megadiff.models.dropout import Dropout
from megadiff.parallel import collectives
from megadiff.parallel.sharded_layers import RowLinear, Style, make_shard, sharded_parameters


@dataclass(frozen=True)
class Plan:
    """How tensor parallelism shards a network.

    Attributes:
        styles: linear modules and convolutions, whose features are their channels. `column` shards the output features
            and leaves them sharded; `row` shards the input features and sums the outputs; `joined_column` shards the
            output features and joins them again. `groups` shards a GroupNorm by whole groups.
        regions: modules whose first input, tokens, enters a tensor-parallel region and whose output a `row` module
            sums. Their further inputs are the same on every rank and are copied into the region.
        entries: modules whose input is the same on every rank, sequence parallel or not, and is copied into a region.
        replicated: parameters that every rank holds and whose gradient is complete on every rank.
        partial: parameters that every rank holds although each sees only its heads, so that gradients are summed.
        token_partial: replicated parameters that see only this rank's tokens under sequence parallelism.
        sharded_dropout: dropouts whose input differs between tensor ranks.
        token_dropout: dropouts whose input differs between tensor ranks under sequence parallelism only.
        first_sharded, first_joined: the layers before which tokens are sharded, and those before which they are joined
            again, under sequence parallelism; none of them where a network cannot have it.
    """

    styles: Mapping[str, Style]
    regions: tuple[str, ...]
    replicated: tuple[str, ...]
    entries: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    token_partial: tuple[str, ...] = ()
    sharded_dropout: tuple[str, ...] = ()
    token_dropout: tuple[str, ...] = ()
    first_sharded: tuple[str, ...] = ()
    first_joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slice:
    """The part of a parameter that a tensor rank holds: `full_shape` cut along `dim` in `degree` equal parts."""

    full_shape: torch.Size
    dim: int
    degree: int
    index: int

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the part starts in the full parameter."""
        start = [0] * len(self.full_shape)
        start[self.dim] = self.index * self.full_shape[self.dim] // self.degree
        return tuple(start)

    def cut(self, full: Tensor) -> Tensor:
        """The part of the full value."""
        return full.chunk(self.degree, dim=self.dim)[self.index]


@dataclass
class Sharding:
    """What `apply_plan` did.

    Attributes:
        slices: the slice of every sharded parameter, by global name.
        partial: names of the parameters that every rank holds but of which each computes a part of the gradient.
    """

    slices: dict[str, Slice] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)

    def full_shapes(self) -> dict[str, torch.Size]:
        """The unsharded shapes of the sharded parameters."""
        return {name: part.full_shape for name, part in self.slices.items()}

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """What this rank holds of a parameter's full value."""
        return self.slices[name].cut(full) if name in self.slices else full


def matches(pattern: str, name: str) -> bool:
    """True if the whole name fits the pattern."""
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", r"[^.]+"), name) is not None


def check_plan(plan: Plan, network: Chain) -> None:
    """Checks a plan against the whole, unsharded network.

    Raises:
        PlanError: a pattern matches nothing, or a parameter falls under no entry or under more than one.
    """
    modules = [name for name, _ in network.named_modules()]
    parameters = [name for name, _ in network.named_parameters()]
    module_patterns = (
        *plan.styles,
        *plan.regions,
        *plan.entries,
        *plan.sharded_dropout,
        *plan.token_dropout,
        *plan.first_sharded,
        *plan.first_joined,
    )
    parameter_patterns = (*plan.replicated, *plan.partial, *plan.token_partial)
    idle = [p for p in module_patterns if not any(matches(p, name) for name in modules)]
    idle += [p for p in parameter_patterns if not any(matches(p, name) for name in parameters)]
    if idle:
        raise PlanError(f"the plan's entries {idle} match nothing in the network; correct or remove them")
    for name in parameters:
        owner = name.rpartition(".")[0]
        hits = [p for p in plan.styles if matches(p, owner)] + [p for p in parameter_patterns if matches(p, name)]
        if len(hits) != 1:
            raise PlanError(f"parameter {name} must fall under exactly one entry of the plan, not under {hits}")


def apply_plan(chain: Chain, plan: Plan, axis: Axis, sequence_parallel: bool) -> Sharding:
    """Shards the layers that are built in `chain`, in place, and wires their collectives.

    Args:
        chain: the network or a stage of it, on the meta device or with values that will be replaced.
        plan: checked by `check_plan`.
        axis: the tensor axis of the grid.
        sequence_parallel: shards tokens between the plan's `first_sharded` and `first_joined` layers.

    Raises:
        PlanError: a sharded dim does not divide by the axis's degree, or there are no tokens to shard.
    """
    sharding = Sharding()
    if sequence_parallel and not plan.first_sharded:
        raise PlanError("sequence_parallel = true needs transformer blocks, and this network has none; set it to false")
    if axis.degree == 1:
        return sharding
    for name, module in list(chain.named_modules()):
        style = next((plan.styles[p] for p in plan.styles if matches(p, name)), None)
        if style is not None:
            _shard(chain, name, module, style, axis, sequence_parallel, sharding)
    _enter_regions(chain, plan, axis, sequence_parallel)
    sharding.partial = _partial_parameters(chain, plan, sequence_parallel)
    _part_dropout_streams(chain, plan, axis, sequence_parallel)
    if sequence_parallel:
        _shard_tokens(chain, plan, axis)
    return sharding


def _shard(
    chain: Chain, name: str, module: nn.Module, style: Style, axis: Axis, sequence: bool, sharding: Sharding
) -> None:
    shard = make_shard(name, module, style, axis, sequence)
    owner, _, leaf = name.rpartition(".")
    setattr(chain.get_submodule(owner), leaf, shard)
    for part, dim in sharded_parameters(module, style).items():
        # DeepSpeed's mark: not the same on every tensor rank.
        shard.get_parameter(part).tensor_model_parallel = True  # type: ignore[attr-defined]
        sharding.slices[f"{name}.{part}"] = Slice(module.get_parameter(part).shape, dim, axis.degree, axis.index)


def _named(chain: Chain, patterns: Iterable[str]) -> list[nn.Module]:
    return [module for name, module in chain.named_modules() if any(matches(p, name) for p in patterns)]


def _enter_regions(chain: Chain, plan: Plan, axis: Axis, sequence: bool) -> None:
    enter = collectives.gather_tokens if sequence else collectives.copy_to_region

    def enter_region(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return enter(inputs[0], axis), *(collectives.copy_to_region(x, axis) for x in inputs[1:])

    for module in _named(chain, plan.regions):
        module.register_forward_pre_hook(enter_region)
    for module in _named(chain, plan.entries):
        module.register_forward_pre_hook(lambda _, inputs: (collectives.copy_to_region(inputs[0], axis),))


def _partial_parameters(chain: Chain, plan: Plan, sequence: bool) -> set[str]:
    """The plan's `partial` entries and, where tokens are sharded, what is applied to this rank's tokens only."""
    biases = {f"{name}.bias" for name, module in chain.named_modules() if sequence and isinstance(module, RowLinear)}
    names = {name for name, _ in chain.named_parameters()}
    patterns = plan.partial + (plan.token_partial if sequence else ())
    return (names & biases) | {name for name in names if any(matches(p, name) for p in patterns)}


def sum_partial_gradients(chain: Chain, partial: set[str], axis: Axis) -> None:
    """Makes each backward pass sum the gradients of the `partial` parameters over the tensor ranks.

    Called once the parameters have their final storage. The hook runs before the gradient is accumulated, so every
    ZeRO stage sees whole gradients.
    """
    for name, parameter in chain.named_parameters():
        if name in partial:
            parameter.register_hook(lambda grad: collectives.all_reduce(grad, axis))


def _part_dropout_streams(chain: Chain, plan: Plan, axis: Axis, sequence: bool) -> None:
    patterns = plan.sharded_dropout + (plan.token_dropout if sequence else ())
    for module in _named(chain, patterns):
        if not isinstance(module, Dropout):
            raise PlanError(f"the plan's dropout entries name a {type(module).__name__}")
        module.stream = axis.index + 1


def _shard_tokens(chain: Chain, plan: Plan, axis: Axis) -> None:
    for layer in _layers(chain, plan.first_sharded):
        layer.register_forward_pre_hook(
            lambda _, inputs: ((collectives.split_tokens(inputs[0][0], axis), *inputs[0][1:]),)
        )
    for layer in _layers(chain, plan.first_joined):
        layer.register_forward_pre_hook(
            lambda _, inputs: ((collectives.join_tokens(inputs[0][0], axis), *inputs[0][1:]),)
        )


def _layers(chain: Chain, patterns: Iterable[str]) -> list[nn.Module]:
    return [chain.layer(name) for name in chain.layer_names if any(matches(p, name) for p in patterns)]


def layers_on_shards(plan: Plan, names: Iterable[str]) -> set[str]:
    """The layers that are given this rank's tokens only, under sequence parallelism; `names` are all in order."""
    found, is_sharded = set(), False
    for name in names:
        if is_sharded:
            found.add(name)
        if any(matches(p, name) for p in plan.first_joined):
            is_sharded = False
        if any(matches(p, name) for p in plan.first_sharded):
            is_sharded = True
    return found
