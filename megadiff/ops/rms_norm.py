"""Root-mean-square norm, by torch or by NVIDIA apex's fused kernel."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.errors import ConfigError

NormBackend = Literal["torch", "apex"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: NormBackend = "torch") -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019), in at least float32.

    Args:
        x: (..., D), any float dtype, which is the result's.
        weight: (D,).
        eps: added to the mean square.
        backend: `apex` calls apex.normalization's fused_rms_norm_affine.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, gain = x.to(dtype), weight.to(dtype)
    if backend == "apex":
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        return fused_rms_norm_affine(wide, gain, gain.shape, eps).to(x.dtype)
    return F.rms_norm(wide, gain.shape, gain, eps).to(x.dtype)


def require_apex(setting: str, module: str) -> None:
    """Raises ConfigError unless NVIDIA apex's `module` can be imported; the package of that name on PyPI is another.

    Args:
        setting: what asks for it, `key = value` of the config.
        module: for example apex.optimizers.
    """
    try:
        __import__(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{setting} needs NVIDIA apex, whose {module} does not load here ({error}); build it from "
            "https://github.com/NVIDIA/apex (the package apex on PyPI is an unrelated one) or choose another value"
        ) from error
