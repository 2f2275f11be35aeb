"""Image files to square 8-bit RGB by Pillow: orientation, colour mode, crop and size. Knows no data set."""

from pathlib import Path

import numpy
import torch
from PIL import Image, ImageOps
from torch import Tensor

from megadiff.errors import DataError


def read_square_rgb(path: Path, size: int) -> Tensor:
    """Return an image file as (3, size, size) uint8: upright, on white, cut to its central square, resized.

    An animation gives its first picture.

    Raises:
        DataError: names the file and the reason.
    """
    try:
        with Image.open(path) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            square = ImageOps.fit(to_rgb(upright), (size, size), method=Image.Resampling.LANCZOS)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read the image {path} ({error}); repair or remove the file") from error
    return to_tensor(square)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the image as 8-bit RGB: 16-bit grey scaled (Pillow would clip it), transparency over white.

    Raises:
        ValueError: the values have no known range (32-bit integer beyond 16 bits, or float).
    """
    if image.mode.startswith("I"):
        image = _scale_to_8_bit(image)
    if image.mode == "F":
        raise ValueError("float pixels have no known range; save the image with 8 or 16 bits")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(white, rgba).convert("RGB")


def _scale_to_8_bit(image: Image.Image) -> Image.Image:
    """Map 16-bit grey 0..65535 to mode L 0..255 by rounding."""
    values = numpy.asarray(image).astype(numpy.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"grey values up to {values.max()} exceed 16 bits; save the image with 8 or 16 bits")
    return Image.fromarray(((values + 128) // 257).astype(numpy.uint8))


def to_tensor(image: Image.Image) -> Tensor:
    """Return an 8-bit RGB or grey image as (C, H, W) uint8."""
    values = torch.from_numpy(numpy.array(image))
    return values.unsqueeze(0) if values.ndim == 2 else values.permute(2, 0, 1).contiguous()
