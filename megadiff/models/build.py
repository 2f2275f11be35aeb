"""Makes a network: structure on the meta device first, then every parameter from a generator of its own.

The initial value of a parameter is a function of (seed, global name) on its full shape, so any layout starts from the
same network, and building needs no more memory than the local part and one full parameter.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from megadiff.config.schema import ModelConfig
from megadiff.models.chain import Builder, Chain
from megadiff.models.dit import dit_builders, dit_initial_value, dit_skips
from megadiff.models.unet import unet_builders, unet_initial_value, unet_skips
from megadiff.ops.backends import Backends

_DEFAULTS = Backends()

InitialValue = Callable[[ModelConfig, str, torch.Size, torch.Generator], Tensor]

_BUILDERS: Mapping[str, Callable[[ModelConfig, Backends], dict[str, Builder]]] = {
    "dit": dit_builders,
    "unet": unet_builders,
}
_SKIPS: Mapping[str, Callable[[ModelConfig], dict[str, str]]] = {"dit": dit_skips, "unet": unet_skips}
_INITIAL_VALUES: Mapping[str, InitialValue] = {"dit": dit_initial_value, "unet": unet_initial_value}
# The operators of megadiff.ops with fused kernels that a network's forward pass calls.
FUSED_OPERATORS: Mapping[str, tuple[str, ...]] = {
    "dit": ("ada_layer_norm", "gated_residual"),
    "unet": ("group_norm_silu",),
}


def long_skips(model: ModelConfig) -> dict[str, str]:
    """The layers of a network that take a long skip, and the earlier layer that each comes from."""
    return _SKIPS[model.name](model)


def meta_chain(model: ModelConfig, backends: Backends = _DEFAULTS, only: Collection[str] | None = None) -> Chain:
    """The network, or some of its layers, on the meta device."""
    return Chain(chain_builders(model, backends), only, long_skips(model))


def chain_builders(model: ModelConfig, backends: Backends = _DEFAULTS) -> dict[str, Builder]:
    """The layers of the network in order, each made on the meta device (parameters only; buffers hold values)."""

    def on_meta(builder: Builder) -> Builder:
        def build() -> nn.Module:
            with torch.device("meta"):
                return builder()

        return build

    return {name: on_meta(builder) for name, builder in _BUILDERS[model.name](model, backends).items()}


def materialize(
    chain: Chain,
    model: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    full_shapes: Mapping[str, torch.Size] | None = None,
    local_part: Callable[[str, Tensor], Tensor] | None = None,
) -> Chain:
    """Gives every parameter of a chain on the meta device its initial value, in place.

    Args:
        chain: the network or a part of it, as built from `chain_builders`.
        model: the settings it was built from.
        seed: with the parameter's name it determines the value.
        dtype, device: what the parameters end up as. Values are drawn in float32 on the CPU.
        full_shapes: the unsharded shape of the parameters that were sharded; the others' own shape is full.
        local_part: takes a parameter's name and full value and returns the part that this rank holds.
    """
    initial_value = _INITIAL_VALUES[model.name]
    for name, parameter in list(chain.named_parameters()):
        shape = (full_shapes or {}).get(name, parameter.shape)
        value = initial_value(model, name, shape, parameter_generator(seed, name))
        value = value if local_part is None else local_part(name, value)
        owner, _, leaf = name.rpartition(".")
        attributes = vars(parameter)
        # A copy, because a part that is cut along the first dim would keep the storage of the whole value alive.
        replacement = nn.Parameter(torch.empty(value.shape, dtype=dtype, device=device).copy_(value))
        for key, attribute in attributes.items():
            setattr(replacement, key, attribute)
        setattr(chain.get_submodule(owner), leaf, replacement)
    return chain.to(device)


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """The CPU generator that a parameter's initial value is drawn from."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def build_network(
    model: ModelConfig, seed: int, dtype: torch.dtype = torch.float32, backends: Backends = _DEFAULTS
) -> Chain:
    """The whole network in one process on the CPU, with its initial values."""
    return materialize(meta_chain(model, backends), model, seed, dtype)
