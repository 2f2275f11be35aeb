"""Sizes of the published networks and of tiny ones for tests. A preset fills only what the config leaves "
"out."""

from typing import Any

from megadiff.config.keys import nearest
from megadiff.errors import ConfigError

# Peebles & Xie, "Scalable Diffusion Models with Transformers" (2023), table 1: hidden size, layers, heads.
_DIT_WIDTHS = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}
_DIT_PATCHES = (2, 4, 8)


def _latent_dit(width: str, patch_size: int) -> dict[str, Any]:
    """A DiT on the 32 x 32 x 4 latents of 256-pixel ImageNet pictures."""
    hidden_size, num_layers, num_heads = _DIT_WIDTHS[width]
    return {
        "name": "dit",
        "input_size": 32,
        "in_channels": 4,
        "patch_size": patch_size,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "mlp_ratio": 4.0,
        "num_classes": 1000,
        "learn_sigma": False,
    }


def _pixel_dit(input_size: int, patch_size: int, hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    """A small DiT on RGB pixels; the number of classes is that of the data."""
    return {
        "name": "dit",
        "input_size": input_size,
        "in_channels": 3,
        "patch_size": patch_size,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
    }


MODEL_PRESETS: dict[str, dict[str, Any]] = {
    **{f"DiT-{width}/{patch}": _latent_dit(width, patch) for width in _DIT_WIDTHS for patch in _DIT_PATCHES},
    "dit-tiny-test": _pixel_dit(8, 2, 32, 4, 4),
    "dit-small-cpu": _pixel_dit(16, 2, 128, 6, 4),
    "dit-medium-cpu": _pixel_dit(32, 2, 256, 8, 8),
}


def preset_values(name: object) -> dict[str, Any]:
    """Return the model fields that a preset sets.

    Raises:
        ConfigError: no preset has this name.
    """
    if isinstance(name, str) and name in MODEL_PRESETS:
        return MODEL_PRESETS[name]
    raise ConfigError(
        f"model.preset = {name!r} is not known; {nearest(str(name), MODEL_PRESETS)}"
        f"the presets are {', '.join(MODEL_PRESETS)}"
    )
