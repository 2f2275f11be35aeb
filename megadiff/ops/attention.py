"""Scaled dot-product attention with a choice of back end."""

import contextlib
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megadiff.errors import ConfigError

AttentionBackend = Literal["auto", "math", "efficient", "flash", "flash_attn"]

_SDPA_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, backend: AttentionBackend = "auto") -> Tensor:
    """softmax(q k^T / sqrt(d)) v, with dropout on the weights.

    Args:
        q, k, v: (B, H, N, d), any float dtype.
        dropout: probability in [0, 1).
        backend: `auto` lets torch choose; `math`, `efficient` and `flash` force one of torch's; `flash_attn` calls the
            package flash-attn.

    Returns:
        (B, H, N, d) in q's dtype.

    Raises:
        ConfigError: `flash_attn` without a working flash-attn package.
    """
    if backend == "flash_attn":
        return _flash_attn(q, k, v, dropout)
    if q.is_meta and backend != "math":
        # Left to itself torch takes the math path on the meta device, and keeps N x N weights that no device keeps.
        mixed: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout)[0]
        return mixed
    with _forced(backend):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def _forced(backend: AttentionBackend) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if backend == "auto" else sdpa_kernel(_SDPA_BACKENDS[backend])


def require_flash_attn() -> None:
    """Raises ConfigError unless flash-attn's interface can be imported (`import flash_attn` alone proves nothing)."""
    try:
        import flash_attn.flash_attn_interface  # noqa: F401
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"train.attention_backend = flash_attn needs the package flash-attn, which does not load here ({error}); "
            "install it with `pip install flash-attn --no-build-isolation` or use train.attention_backend = auto"
        ) from error


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    require_flash_attn()
    from flash_attn.flash_attn_interface import flash_attn_func

    mixed = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout_p=dropout)
    return mixed.transpose(1, 2)
