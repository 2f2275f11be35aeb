"""How near pictures come to a reference of the same names, such as those of many steps. Needs the extra `evaluate`."""

import itertools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from megadiff.data.dataset import to_signed_unit
from megadiff.errors import DataError
from megadiff.evaluation.extract import Work
from megadiff.evaluation.images import ImageFiles, batches

_RANGE = 2.0  # of pictures in [-1, 1]
_SSIM_WINDOW = 11  # pixels a side
_LPIPS_LEAST = 16  # pixels a side, which VGG-16 halves four times


@dataclass(frozen=True)
class Fidelity:
    """Means over pairs.

    Attributes:
        psnr: peak signal-to-noise ratio in dB, higher is better; infinite if a pair is the same.
        ssim: structural similarity (Wang et al. 2004), at most 1.
        lpips: learned distance (Zhang et al. 2018), lower is better; None without its network.
    """

    psnr: float
    ssim: float
    lpips: float | None


@torch.no_grad()
def compare_pairs(images: Tensor, references: Tensor, lpips: nn.Module | None = None) -> dict[str, Tensor]:
    """Figures of each pair, (B,), by their names in `Fidelity`: PSNR and SSIM in float64.

    Args:
        images: (B, 3, H, W) in [-1, 1], at least 11 pixels a side; 16 for LPIPS.
        references: the same.
        lpips: from `load_lpips`.

    Raises:
        DataError: torchmetrics is not installed.
    """
    try:
        from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure
    except ImportError as error:
        raise DataError(f"--reference needs torchmetrics ({error}); pip install 'megadiff[evaluate]'") from error
    first, second = images.double(), references.double()
    found: dict[str, Any] = {
        "psnr": peak_signal_noise_ratio(first, second, data_range=_RANGE, reduction="none", dim=(1, 2, 3)),
        "ssim": structural_similarity_index_measure(first, second, data_range=_RANGE, reduction="none"),
    }
    return found if lpips is None else {**found, "lpips": lpips(images, references).double()}


def measure_fidelity(images: ImageFiles, references: ImageFiles, lpips: nn.Module | None, work: Work) -> Fidelity:
    """Compares every picture with the reference of its name.

    Raises:
        DataError: names or sizes differ, or the pictures are too small.
    """
    check_pairs(images, references, with_lpips=lpips is not None)
    parts: dict[str, list[Tensor]] = {"psnr": [], "ssim": [], "lpips": []}
    network = None if lpips is None else lpips.to(work.device)
    both = (batches(part, work.batch_size, work.threads) for part in (images, references))
    with tqdm(total=len(images), unit="pair", disable=not sys.stderr.isatty()) as bar:
        for pair in zip(*both, strict=True):
            first, second = (to_signed_unit(pixels).to(work.device) for pixels in pair)
            for name, values in compare_pairs(first, second, network).items():
                parts[name].append(values.cpu())
            bar.update(len(first))
    means = {name: float(torch.cat(values).mean()) for name, values in parts.items() if values}
    return Fidelity(means["psnr"], means["ssim"], means.get("lpips"))


def check_pairs(images: ImageFiles, references: ImageFiles, with_lpips: bool) -> None:
    """Refuses sets whose files cannot be compared one by one.

    Raises:
        DataError: names or sizes differ, or a side has less than 11 pixels (16 with LPIPS).
    """
    for name, other in itertools.zip_longest(images.names, references.names):
        if name != other:
            lone = min(entry for entry in (name, other) if entry is not None)
            where = images.folder if lone == other else references.folder
            raise DataError(f"{where} has no {lone}; --reference needs the same file names as --fake")
    if images.size != references.size:
        raise DataError(
            f"{images.folder} has pictures of {images.size[0]} x {images.size[1]} pixels and {references.folder} of "
            f"{references.size[0]} x {references.size[1]}; resize all with --size"
        )
    least = _LPIPS_LEAST if with_lpips else _SSIM_WINDOW
    if min(images.size) < least:
        raise DataError(
            f"pictures of {images.size[0]} x {images.size[1]} pixels are too small for --reference; it needs {least} "
            "a side: leave it out, or use --size"
        )
