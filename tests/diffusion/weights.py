"""Small seeded files in the place of published weights: VGG-19 up to relu3_3, and a VAE of a few channels."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL

from megadiff.models.vgg import VggFeatures


def save_vgg(path: Path, seed: int = 0) -> Path:
    """A file as torchvision's, with the layers after relu3_3 cut short."""
    torch.manual_seed(seed)
    values = VggFeatures().state_dict()
    for value in values.values():
        if value.dim() > 1:
            torch.nn.init.kaiming_normal_(value)
    torch.save({**values, "features.16.weight": torch.zeros(1), "classifier.6.bias": torch.zeros(3)}, path)
    return path


def save_vae(path: Path, seed: int = 0, channels: int = 3) -> Path:
    """A folder of diffusers' AutoencoderKL that doubles the size."""
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=channels,
        scaling_factor=0.5,
    )
    vae.save_pretrained(str(path))
    return path
