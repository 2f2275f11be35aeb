"""Mirroring, cropping and colour jitter, each decided by (seed, sample id) alone: the same on every layout."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megadiff.ops.philox import Purpose, uniform

# Which uniform number of a sample decides what; flips keep the first, so that runs without the others do not change.
_FLIP, _ZOOM, _LEFT, _TOP, _HUE, _SATURATION, _VALUE = range(7)
_NUM_DRAWS = 7


@dataclass(frozen=True)
class Augmentation:
    """What happens to pictures before training.

    Attributes:
        flip: mirror about half of them left to right.
        random_crop: cut off up to this share of each side, at a random place, and enlarge the rest; 0 for never.
        hsv_jitter: change hue by up to this share of the circle, saturation and value by up to these shares of
            themselves.
    """

    flip: bool = False
    random_crop: float = 0.0
    hsv_jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def apply(self, images: Tensor, seed: int, sample_ids: Tensor) -> Tensor:
        """Change pictures (B, C, H, W) in [-1, 1] by their sample ids (B,)."""
        if self == Augmentation():
            return images
        draws = uniform(seed, 0, sample_ids, Purpose.AUGMENT, (_NUM_DRAWS,))
        if self.flip:
            images = torch.where((draws[:, _FLIP] < 0.5)[:, None, None, None], images.flip(-1), images)
        if self.random_crop > 0:
            images = crop(images, 1.0 - self.random_crop * draws[:, _ZOOM], draws[:, [_LEFT, _TOP]])
        if any(self.hsv_jitter):
            strengths = torch.tensor(self.hsv_jitter) * (2.0 * draws[:, [_HUE, _SATURATION, _VALUE]] - 1.0)
            images = jitter(images, strengths)
        return images


def crop(images: Tensor, shares: Tensor, places: Tensor) -> Tensor:
    """Cut squares out of pictures and enlarge them to the full size by bilinear interpolation.

    Args:
        images: (B, C, H, W).
        shares: (B,) of the side that stays, in (0, 1].
        places: (B, 2) in [0, 1]: 0 keeps the left (top), 1 the right (bottom) of the picture.
    """
    centres = (2.0 * places - 1.0) * (1.0 - shares)[:, None]
    zeros = torch.zeros_like(shares)
    rows = torch.stack((shares, zeros, centres[:, 0], zeros, shares, centres[:, 1]), dim=1).view(-1, 2, 3)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def jitter(images: Tensor, strengths: Tensor) -> Tensor:
    """Turn the hue and scale saturation and value of colour pictures.

    Args:
        images: (B, 3, H, W) in [-1, 1].
        strengths: (B, 3): share of the circle by which the hue turns, and changes of saturation and value relative to
            themselves.
    """
    hue, saturation, value = rgb_to_hsv((images + 1.0) / 2.0).unbind(1)
    by_hue, by_saturation, by_value = strengths[:, :, None, None].unbind(1)
    turned = (hue + by_hue) % 1.0
    scaled = (saturation * (1.0 + by_saturation)).clamp(0.0, 1.0), (value * (1.0 + by_value)).clamp(0.0, 1.0)
    return hsv_to_rgb(torch.stack((turned, *scaled), dim=1)) * 2.0 - 1.0


def rgb_to_hsv(rgb: Tensor) -> Tensor:
    """(B, 3, H, W) in [0, 1] to hue, saturation and value in [0, 1] (Smith 1978); grey has hue 0."""
    red, green, blue = rgb.unbind(1)
    value, low = rgb.amax(1), rgb.amin(1)
    span = value - low
    safe = torch.where(span > 0, span, 1.0)
    sector = torch.where(value == red, (green - blue) / safe, (blue - red) / safe + 2.0)
    sector = torch.where((value == blue) & (value != red) & (value != green), (red - green) / safe + 4.0, sector)
    hue = torch.where(span > 0, sector / 6.0 % 1.0, 0.0)
    saturation = torch.where(value > 0, span / torch.where(value > 0, value, 1.0), 0.0)
    return torch.stack((hue, saturation, value), dim=1)


def hsv_to_rgb(hsv: Tensor) -> Tensor:
    """The inverse of `rgb_to_hsv`."""
    hue, saturation, value = hsv.unbind(1)

    def channel(offset: float) -> Tensor:
        position = (offset + hue * 6.0) % 6.0
        return value - value * saturation * torch.minimum(position, 4.0 - position).clamp(0.0, 1.0)

    return torch.stack((channel(5.0), channel(3.0), channel(1.0)), dim=1)
