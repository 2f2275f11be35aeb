"""Finds text in pictures by reading it with an OCR package, the extra `ocr`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megadiff.errors import ConfigError

_LEAST_SCORE = 0.8  # of the recogniser in a line; single signs are also read into flags and faces
_LEAST_LETTERS = 2
_LEAST_SIDE = 448  # pixels that smaller pictures are enlarged to


@functools.cache
def open_reader() -> Callable[[Tensor], Tensor]:
    """Loads RapidOCR, whose weights come with the package, and returns its detector.

    The detector maps (B, C, H, W) pictures in [-1, 1] to (B,) bool on the CPU: whether a line of at least two letters
    or digits can be read. Of one or two channels the first is grey, of more the first three are red, green and blue.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise ConfigError(
            f"sampling.text_guard = ocr needs rapidocr and onnxruntime ({error}): pip install 'megadiff[ocr]', or use "
            "strokes, which needs nothing"
        ) from error
    read = RapidOCR(
        params={
            "Global.use_cls": False,  # of upside-down lines
            "Global.log_level": "critical",
            "Det.limit_side_len": _LEAST_SIDE,
            # onnxruntime's own default takes every core from the other ranks.
            "EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads(),
        }
    )

    def find_text(images: Tensor) -> Tensor:
        levels = ((images.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        blue_first = levels[:, :3].flip(1) if levels.shape[1] >= 3 else levels[:, :1].expand(-1, 3, -1, -1)
        return torch.tensor([_has_text(read(picture.permute(1, 2, 0).contiguous().numpy())) for picture in blue_first])

    return find_text


def _has_text(result: Any) -> bool:
    lines = zip(result.txts or (), result.scores or (), strict=True)
    return any(score >= _LEAST_SCORE and sum(map(str.isalnum, line)) >= _LEAST_LETTERS for line, score in lines)
