"""Finds text in pictures by its strokes; what finds it is pluggable."""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from megadiff.errors import ConfigError
from megadiff.sampling.ocr import open_reader

# (B, C, H, W) pictures in [-1, 1] -> (B,) bool: whether there is text.
Detector = Callable[[Tensor], Tensor]

_LEAST_CONTRAST = 0.3  # of a stroke to both of its sides, where black to white is 2
_CONTRAST = 0.3  # the same, of the range of grey around
_WIDEST = 4  # pixels of a stroke
_WINDOW = 16  # pixels a side
_DENSITY = 0.235  # share of a window's pixels in strokes, across and along, above which it is text


def find_strokes(images: Tensor) -> Tensor:
    """Whether some window of each picture is as full of thin strokes as writing is, both ways; (B,) bool.

    A stroke is a run of up to 4 pixels that is darker, or lighter, than what is on both sides of it. Letters have
    strokes in rows and in columns, stripes and edges in one of them at most.

    Args:
        images: (B, C, H, W) in [-1, 1].
    """
    grey = images.float().mean(1)
    side = min(_WINDOW, *grey.shape[1:])
    contrast = (_CONTRAST * _range_around(grey, side)).clamp(min=_LEAST_CONTRAST)
    along, across = _runs(grey, contrast), _runs(grey.transpose(1, 2), contrast.transpose(1, 2)).transpose(1, 2)
    strokes = torch.stack([along, across], dim=1)
    density = functional.avg_pool2d(strokes, side, stride=max(1, side // 2))
    return (density > _DENSITY).all(1).flatten(1).any(1)


def load_detector(name: str) -> Detector:
    """The detector of `sampling.text_guard`: `strokes`, `ocr`, or `package.module:function`.

    Raises:
        ConfigError: there is none of that name, or its package is not installed.
    """
    if name == "strokes":
        return find_strokes
    if name == "ocr":
        return open_reader()
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"sampling.text_guard = {name} is not there ({error}); use strokes, ocr or package.module:function"
        ) from None
    if not callable(found):
        raise ConfigError(f"sampling.text_guard = {name} is not a function; name one as package.module:function")
    return found


def _range_around(grey: Tensor, side: int) -> Tensor:
    """Lightest minus darkest in a window around each pixel, (B, H, W)."""
    padding, odd = side // 2, side // 2 * 2 + 1
    lightest, darkest = (functional.max_pool2d(part, odd, stride=1, padding=padding) for part in (grey, -grey))
    return lightest + darkest


def _runs(grey: Tensor, contrast: Tensor) -> Tensor:
    """1 where a pixel is in a short run along the last dim that both ends stand out from, 0 elsewhere; (B, H, W)."""
    length = grey.shape[-1]
    marked = torch.zeros_like(grey)
    for width in range(1, min(_WIDEST, length - 2) + 1):
        before, after = grey[..., : length - width - 1], grey[..., width + 1 :]
        inner = grey.unfold(-1, width, 1)[..., 1 : length - width, :]
        least = contrast[..., 1 : length - width]
        darker = inner.amax(-1) < torch.minimum(before, after) - least
        lighter = inner.amin(-1) > torch.maximum(before, after) + least
        run = (darker | lighter).to(grey.dtype)
        for offset in range(width):
            marked[..., 1 + offset : 1 + offset + run.shape[-1]] += run
    return marked.clamp(max=1)
