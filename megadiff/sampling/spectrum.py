"""How much of a picture's energy is in fine detail: what dynamic steps decide by."""

import torch
from torch import Tensor


def high_band_share(x: Tensor) -> Tensor:
    """Mean energy of the upper half of the frequencies by the mean energy of all; (B,).

    About 1 for white noise of any deviation and size, less for pictures.

    Args:
        x: (B, C, H, W).
    """
    work = x if x.dtype == torch.float64 else x.float()
    energy = torch.fft.fft2(work).abs().square().mean(1)
    rows, columns = (torch.fft.fftfreq(side, device=x.device) for side in x.shape[2:])
    upper = (rows[:, None] ** 2 + columns**2).sqrt() > 0.25  # half of the highest frequency along an axis
    return energy[:, upper].mean(1) / energy.mean((1, 2))
