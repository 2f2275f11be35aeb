"""Pictures from tensors: 8-bit values, PNG files and grids."""

from pathlib import Path

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from megadiff.errors import DataError

METADATA_KEY = "megadiff"
_WHITE = 255
_VISIBLE_PIXELS = 64


def to_uint8(images: Tensor) -> Tensor:
    """Map floats in [-1, 1] to uint8, rounding and clamping; NaN, which has no 8-bit value, becomes 0."""
    levels = (images.float() + 1.0).mul(127.5).round().clamp(0, 255)
    return torch.nan_to_num(levels, nan=0.0).to(torch.uint8)


def grid(images: Tensor, columns: int, scale: int | None = None, gap: int = 2) -> Tensor:
    """Lay pictures out row by row on white; `columns` images of each class in turn give one row per class.

    Args:
        images: (N, C, H, W), floats in [-1, 1] or uint8.
        columns: pictures in a row; the last row may be short.
        scale: enlarges by this whole number without smoothing; None makes a picture at least 64 pixels high.
        gap: white pixels around every picture.

    Returns:
        (C, rows * (scale * H + gap) + gap, columns * (scale * W + gap) + gap) uint8 on the CPU.
    """
    pixels = (images if images.dtype == torch.uint8 else to_uint8(images)).cpu()
    num_images, channels, height, width = pixels.shape
    scale = scale or max(1, -(-_VISIBLE_PIXELS // height))
    pixels = pixels.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    row_pitch, column_pitch = scale * height + gap, scale * width + gap
    rows = -(-num_images // columns)
    size = (channels, rows * row_pitch + gap, columns * column_pitch + gap)
    canvas = torch.full(size, _WHITE, dtype=torch.uint8)
    for i, picture in enumerate(pixels):
        top, left = gap + i // columns * row_pitch, gap + i % columns * column_pitch
        canvas[:, top : top + scale * height, left : left + scale * width] = picture
    return canvas


def save_png(image: Tensor, path: Path, metadata: str = "") -> None:
    """Write one picture (C, H, W), floats in [-1, 1] or uint8, making the folder if it is missing.

    A text about it can be read back as `PIL.Image.open(path).info[METADATA_KEY]`.

    Raises:
        DataError: C is neither 1 (grey) nor 3 (RGB).
    """
    pixels = (image if image.dtype == torch.uint8 else to_uint8(image)).cpu()
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3):
        raise DataError(
            f"a tensor of shape {tuple(pixels.shape)} is no picture of 1 or 3 channels; decode latents first"
        )
    array = pixels[0].numpy() if pixels.shape[0] == 1 else pixels.permute(1, 2, 0).contiguous().numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    about = PngInfo()
    if metadata:
        about.add_text(METADATA_KEY, metadata)
    Image.fromarray(array).save(path, format="PNG", pnginfo=about)
