"""Sizes of the published networks and of tiny ones for tests. A preset fills only what the config leaves
out."""

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


def _unet(channels: tuple[int, ...], depths: tuple[int, ...], **values: Any) -> dict[str, Any]:
    """A UNet with attention of `depths` at its levels; the last depth also stands in the middle unless it is given."""
    return {
        "name": "unet",
        "block_out_channels": channels,
        "transformer_layers_per_block": depths,
        "mid_block_transformer_layers": depths[-1],
        **values,
    }


# Published sizes: DDPM on CIFAR-10 (Ho et al. 2020), ADM at 256 pixels (Dhariwal & Nichol 2021), Stable Diffusion 2
# (Rombach et al. 2022) and SDXL (Podell et al. 2023) on latents.
_UNETS: dict[str, dict[str, Any]] = {
    "unet-cifar": _unet(
        (128, 256, 256, 256),
        (0, 1, 0, 0),
        mid_block_transformer_layers=1,
        input_size=32,
        in_channels=3,
        attention_head_dim=64,
        dropout=0.1,
    ),
    "unet-256": _unet(
        (256, 256, 512, 512, 1024, 1024),
        (0, 0, 0, 1, 1, 1),
        input_size=256,
        in_channels=3,
        attention_head_dim=64,
        num_classes=1000,
        resnet_time_scale_shift=True,
    ),
    "sd2": _unet(
        (320, 640, 1280, 1280),
        (1, 1, 1, 0),
        mid_block_transformer_layers=1,
        condition="text",
        input_size=64,
        in_channels=4,
        attention_head_dim=64,
        cross_attention_dim=1024,
    ),
    "sdxl": _unet(
        (320, 640, 1280),
        (0, 2, 10),
        condition="text",
        input_size=128,
        in_channels=4,
        attention_head_dim=64,
        cross_attention_dim=2048,
        pooled_dim=1280,
        pixel_size=1024,
    ),
    "unet-tiny-test": _unet(
        (16, 32),
        (0, 1),
        input_size=8,
        in_channels=3,
        layers_per_block=1,
        attention_head_dim=8,
        norm_num_groups=8,
    ),
    "unet-text-tiny-test": _unet(
        (16, 32),
        (1, 2),
        condition="text",
        input_size=8,
        in_channels=3,
        layers_per_block=1,
        attention_head_dim=8,
        norm_num_groups=8,
        cross_attention_dim=12,
        text_length=5,
        pooled_dim=6,
        pixel_size=64,
    ),
    "unet-small-cpu": _unet(
        (48, 96), (0, 1), input_size=16, in_channels=3, layers_per_block=1, attention_head_dim=32, norm_num_groups=16
    ),
}

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    **{f"DiT-{width}/{patch}": _latent_dit(width, patch) for width in _DIT_WIDTHS for patch in _DIT_PATCHES},
    "dit-tiny-test": _pixel_dit(8, 2, 32, 4, 4),
    "dit-small-cpu": _pixel_dit(16, 2, 128, 6, 4),
    "dit-medium-cpu": _pixel_dit(32, 2, 256, 8, 8),
    "udit-tiny": {**_pixel_dit(8, 2, 32, 7, 4), "long_skips": True},
    **_UNETS,
}

# Rates that go with a batch size, and those of a small batch of pictures of 256 or 512 pixels.
OPTIMIZER_PRESETS: dict[str, dict[str, Any]] = {
    "batch-256": {"lr": 1e-4, "warmup_epochs": 5.0},
    "batch-512": {"lr": 5e-5, "warmup_epochs": 3.0},
    "small-batch": {"name": "adamw", "lr": 3e-5, "betas": (0.9, 0.99), "lr_schedule": "cosine"},
}

# What `preset` names in each section that has one.
PRESETS = {"model": MODEL_PRESETS, "optimizer": OPTIMIZER_PRESETS}


def preset_values(name: object, section: str = "model") -> dict[str, Any]:
    """Return the fields of a section that a preset sets.

    Raises:
        ConfigError: no preset has this name.
    """
    presets = PRESETS[section]
    if isinstance(name, str) and name in presets:
        return presets[name]
    raise ConfigError(
        f"{section}.preset = {name!r} is not known; {nearest(str(name), presets)}the presets are {', '.join(presets)}"
    )
