"""Tensor parallelism as data: a table of name patterns says how each module is sharded, and one function applies it.

In a pattern `*` stands for one name between dots and `[abc]` for one letter.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadiff.dist.grid import Axis
from megadiff.errors import PlanError
from megadiff.models.chain import Chain
from megadiff.models.layers import Dropout
from megadiff.parallel import collectives

Style = Literal["column", "row", "joined_column"]


@dataclass(frozen=True)
class Plan:
    """How tensor parallelism shards a network.

    Attributes:
        styles: linear modules. `column` shards the output features and leaves them sharded; `row` shards the input
            features and sums the outputs; `joined_column` shards the output features and joins them again.
        regions: modules whose input enters a tensor-parallel region and whose output a `row` module sums.
        replicated: parameters that every rank holds and whose gradient is complete on every rank.
        partial: parameters that every rank holds although each sees only its heads, so that gradients are summed.
        sharded_dropout: dropouts whose input differs between tensor ranks.
        token_dropout: dropouts whose input differs between tensor ranks under sequence parallelism only.
        first_sharded, first_joined: layers between which tokens are sharded under sequence parallelism.
    """

    styles: Mapping[str, Style]
    regions: tuple[str, ...]
    replicated: tuple[str, ...]
    partial: tuple[str, ...] = ()
    sharded_dropout: tuple[str, ...] = ()
    token_dropout: tuple[str, ...] = ()
    first_sharded: str = ""
    first_joined: str = ""


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


class RowLinear(nn.Module):
    """A linear layer of which each rank holds some input features; partial outputs are summed, then the bias added."""

    def __init__(self, in_features: int, out_features: int, has_bias: bool, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        leave = collectives.reduce_scatter_tokens if self.sequence else collectives.reduce_from_region
        total = leave(F.linear(x, self.weight), self.axis)
        return total if self.bias is None else total + self.bias


class JoinedColumnLinear(nn.Linear):
    """A linear layer of which each rank computes some output features, and every rank gets all of them."""

    def __init__(self, in_features: int, out_features: int, has_bias: bool, axis: Axis, sequence: bool) -> None:
        super().__init__(in_features, out_features, has_bias)
        self.axis, self.sequence = axis, sequence

    def forward(self, x: Tensor) -> Tensor:
        columns = super().forward(collectives.copy_to_region(x, self.axis))
        return collectives.join_columns(columns, self.axis, partial_gradient=self.sequence)


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
    module_patterns = (*plan.styles, *plan.regions, *plan.sharded_dropout, *plan.token_dropout)
    parameter_patterns = (*plan.replicated, *plan.partial)
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
        PlanError: a sharded dim does not divide by the axis's degree.
    """
    sharding = Sharding()
    if axis.degree == 1:
        return sharding
    for name, module in list(chain.named_modules()):
        style = next((plan.styles[p] for p in plan.styles if matches(p, name)), None)
        if style is not None:
            _shard_linear(chain, name, module, style, axis, sequence_parallel, sharding)
    _enter_regions(chain, plan, axis, sequence_parallel)
    sharding.partial = _partial_parameters(chain, plan, sequence_parallel)
    _part_dropout_streams(chain, plan, axis, sequence_parallel)
    if sequence_parallel:
        _shard_tokens(chain, plan, axis)
    return sharding


def _shard_linear(
    chain: Chain, name: str, module: nn.Module, style: Style, axis: Axis, sequence: bool, sharding: Sharding
) -> None:
    if not isinstance(module, nn.Linear):
        raise PlanError(f"{name} is a {type(module).__name__}; the style {style} shards linear layers")
    dim = 1 if style == "row" else 0
    size = module.weight.shape[dim]
    if size % axis.degree:
        raise PlanError(f"tensor_model_parallel_size = {axis.degree} does not divide {name}'s {size} features")
    inputs, outputs, has_bias = module.in_features, module.out_features, module.bias is not None
    with torch.device(module.weight.device):
        if style == "row":
            shard: nn.Module = RowLinear(inputs // axis.degree, outputs, has_bias, axis, sequence)
        elif style == "column":
            shard = nn.Linear(inputs, outputs // axis.degree, has_bias)
        else:
            shard = JoinedColumnLinear(inputs, outputs // axis.degree, has_bias, axis, sequence)
    owner, _, leaf = name.rpartition(".")
    setattr(chain.get_submodule(owner), leaf, shard)
    sharded = ("weight",) if style == "row" or not has_bias else ("weight", "bias")
    for part in sharded:
        getattr(shard, part).tensor_model_parallel = True  # DeepSpeed's mark: not the same on every tensor rank
        sharding.slices[f"{name}.{part}"] = Slice(getattr(module, part).shape, dim, axis.degree, axis.index)


def _named(chain: Chain, patterns: Iterable[str]) -> list[nn.Module]:
    return [module for name, module in chain.named_modules() if any(matches(p, name) for p in patterns)]


def _enter_regions(chain: Chain, plan: Plan, axis: Axis, sequence: bool) -> None:
    enter = collectives.gather_tokens if sequence else collectives.copy_to_region
    for module in _named(chain, plan.regions):
        module.register_forward_pre_hook(lambda _, inputs: (enter(inputs[0], axis), *inputs[1:]))


def _partial_parameters(chain: Chain, plan: Plan, sequence: bool) -> set[str]:
    """The plan's `partial` entries and, where tokens are sharded, the biases that are added to this rank's tokens."""
    biases = {f"{name}.bias" for name, module in chain.named_modules() if sequence and isinstance(module, RowLinear)}
    names = {name for name, _ in chain.named_parameters()}
    return (names & biases) | {name for name in names if any(matches(p, name) for p in plan.partial)}


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
    for name in chain.layer_names:
        if name == plan.first_sharded:
            chain.layer(name).register_forward_pre_hook(
                lambda _, inputs: ((collectives.split_tokens(inputs[0][0], axis), *inputs[0][1:]),)
            )
        if name == plan.first_joined:
            chain.layer(name).register_forward_pre_hook(
                lambda _, inputs: ((collectives.join_tokens(inputs[0][0], axis), *inputs[0][1:]),)
            )
