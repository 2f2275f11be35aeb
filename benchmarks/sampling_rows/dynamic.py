"""Dynamic steps: error to many steps from the same seeds, beside fixed steps at as many calls of the network."""

from collections.abc import Iterator
from functools import partial

import torch
from report import Row
from sampling_rows.networks import predict_of, psnr, sample, trained
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.sampling.guidance import Predict

_STEPS, _BATCH = 40, 16
_REFERENCE_STEPS = 250  # of a second-order solver: nearer to the flow's end than 1000 of DDIM, in less time
_PUBLISHED_STEPS, _PUBLISHED_FIXED, _PUBLISHED_PSNR = 50, 34, 28.0


class Counted:
    """A network that counts its calls, in pictures."""

    def __init__(self, predict: Predict) -> None:
        self.answers = 0
        self._predict = predict

    def __call__(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        self.answers += len(x_t)
        return self._predict(x_t, t, labels)


def rows(quick: bool) -> Iterator[Row]:
    """For each network: both solvers that can, and the published rule."""
    for name in ("dit", "unet"):
        config, chain = trained(name, quick)
        opened, predict = partial(predict_of, chain), predict_of(chain)
        reference = sample(config, opened, _BATCH, solver="dpmpp_2m", steps=16 if quick else _REFERENCE_STEPS)
        for solver in ("ddim", "dpmpp_2m"):
            found, calls = _counted(
                config, predict, solver=solver, steps=8 if quick else _STEPS, dynamic_steps="spectrum"
            )
            fixed = sample(config, opened, _BATCH, solver=solver, steps=round(calls))
            ours, other = (_rms(images, reference) for images in (found, fixed))
            title = f"dynamic steps {name}, {solver}: {calls:.1f} calls against {round(calls)} fixed"
            yield Row(title, ours, other, "rms", ours / other, 1.0, lower_is_better=True)
        settings = {"solver": "ddim", "steps": _PUBLISHED_STEPS, "dynamic_steps": "seed"}
        found, calls = _counted(config, predict, **settings)
        fixed = sample(config, opened, _BATCH, solver="ddim", steps=_PUBLISHED_FIXED)
        ours, other = (float(psnr(images, reference).mean()) for images in (found, fixed))
        note = f"{calls:.1f} calls; other: {_PUBLISHED_FIXED} fixed steps; the ratio is of the PSNR to 28 dB"
        yield Row(f"published rule {name}: PSNR", ours, other, "dB", ours / _PUBLISHED_PSNR, 1.0, note=note)
        title = f"published rule {name}: mean calls"
        yield Row(title, calls, _PUBLISHED_FIXED, "", calls / _PUBLISHED_FIXED, 1.0, 24 / 34, lower_is_better=True)


def _counted(config: Config, predict: Predict, **sampling: object) -> tuple[Tensor, float]:
    """Pictures and calls each; guidance asks twice a call."""
    counted = Counted(predict)
    images = sample(config, lambda: counted, _BATCH, **sampling)
    return images, counted.answers / _BATCH / (1 if config.sampling.guidance == 1 else 2)


def _rms(images: Tensor, reference: Tensor) -> float:
    return float(torch.sqrt((images - reference).square().mean()))
