"""A trained network with int8 weights, for sampling: linear layers by torchao, convolutions by `Int8Conv2d`.

Embeddings, norms and biases stay float, and so do the first convolution and the last layer, which hold 0.1 % of the
bytes. PSNR of samples against those of the float network, of the DiT and the UNet in benchmarks/sampling_rows: 63 and
65 dB with the first convolution alone in int8, 58 and 59 dB with the last layer alone; 52 and 56 dB with all layers,
56 and 57 dB with all but these two. Time embeddings (67 and 64 dB) and modulations (68 and 72 dB) do not stand out for
what they hold, a third of a DiT.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from megadiff.errors import ConfigError
from megadiff.models.chain import Chain
from megadiff.models.int8_conv import Int8Conv2d

_FLOAT = frozenset({"embed.patch", "embed.conv", "head.out", "head.conv"})
_MULTIPLE_OF = 8  # CUDA's integer product wants multiples of it; torchao takes other sizes to the CPU at every call


class _Torchao(NamedTuple):
    quantize: Any
    config: Any
    should_reduce_range: Any


def require_torchao() -> _Torchao:
    """The three names of torchao that this file uses, imported at the first call.

    Raises:
        ConfigError: it is not installed, or does not load beside this torch.
    """
    try:
        with _errors_only("torchao", "torch.utils._pytree"):  # of kernels that are for other formats than int8
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
            from torchao.utils import should_reduce_range
    except ImportError as error:
        raise ConfigError(f"int8 quantization needs torchao ({error}); pip install 'megadiff[int8]'") from error
    return _Torchao(quantize_, Int8DynamicActivationInt8WeightConfig, should_reduce_range)


def quantize_int8(chain: Chain) -> bool:
    """Replaces the weights of a network or a pipeline stage by int8 ones, in place; only for inference.

    Linear weights become torchao tensors, one scale an output feature, and their inputs are rounded to int8 at each
    call, one scale a token, so that a sample does not depend on its batch. Linear layers whose features are no
    multiples of 8 stay float.

    Args:
        chain: float32 with its trained values, not sharded over tensor ranks, not compiled yet.

    Returns:
        Whether linear layers use 7 bits: CPUs without VNNI add products in 16 bits, which 8 bits would overflow.

    Raises:
        ConfigError: torchao is not installed.
    """
    torchao = require_torchao()
    is_reduced: bool = torchao.should_reduce_range(next(chain.parameters()).device)
    config = torchao.config(reduce_range=is_reduced, set_inductor_config=False)  # no settings of the whole process
    torchao.quantize(chain, config, _is_int8_linear)
    for name, module in list(chain.named_modules()):
        if isinstance(module, nn.Conv2d) and name not in _FLOAT:
            owner, _, leaf = name.rpartition(".")
            setattr(chain.get_submodule(owner), leaf, Int8Conv2d(module))
    return is_reduced


def held_bytes(module: nn.Module) -> int:
    """The memory that a module's parameters and buffers keep, those behind torchao's tensors included."""
    storages = {}
    for tensor in (*module.parameters(), *module.buffers()):
        for part in _parts(tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _is_int8_linear(module: nn.Module, name: str) -> bool:
    if not isinstance(module, nn.Linear) or name in _FLOAT:
        return False
    return module.in_features % _MULTIPLE_OF == 0 and module.out_features % _MULTIPLE_OF == 0


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of; the storage of a wrapper is none."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in _parts(getattr(tensor, name))]


@contextlib.contextmanager
def _errors_only(*loggers: str) -> Iterator[None]:
    """Hides warnings that an import logs."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
