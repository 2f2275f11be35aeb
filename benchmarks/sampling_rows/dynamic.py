"""Dynamic steps: error to many steps from the same seeds, beside fixed steps at as many calls of the network."""

import math
from collections.abc import Iterator

from report import Row
from sampling_rows.networks import predict_of, psnr, reference, rms, sample, trained
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.sampling.guidance import Predict

_BATCH = 16
_STEPS = (24, 28, 34, 40, 50)  # of the short strides; the ratio is the geometric mean, as single ones scatter
_ENOUGH_PSNR = 28.0
_PUBLISHED_STEPS, _PUBLISHED_FIXED, _PUBLISHED_AIM = 50, 34, 24


class Counted:
    """A network that counts its calls, in pictures."""

    def __init__(self, predict: Predict) -> None:
        self.answers = 0
        self._predict = predict

    def __call__(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        self.answers += len(x_t)
        return self._predict(x_t, t, labels)


def rows(quick: bool) -> Iterator[Row]:
    """For each network: both solvers that can, the calls to a good picture, and the published setting."""
    for name in ("dit", "unet"):
        config, chain = trained(name, quick)
        predict, expected = predict_of(chain), reference(name, quick, _BATCH)
        for solver in ("ddim", "dpmpp_2m"):
            yield _equal_cost(name, config, predict, expected, solver, (8,) if quick else _STEPS)
        yield _calls_to_enough(name, config, predict, expected, range(4, 5) if quick else range(4, 20))
        for rule in ("spectrum", "seed"):
            yield from _published_setting(name, config, predict, expected, rule)


def _published_setting(name: str, config: Config, predict: Predict, expected: Tensor, rule: str) -> Iterator[Row]:
    """50 steps of DDIM: pictures and calls, with 34 fixed ones beside them; `seed` is the published rule too."""
    found, calls = _counted(config, predict, solver="ddim", steps=_PUBLISHED_STEPS, dynamic_steps=rule)
    fixed, _ = _counted(config, predict, solver="ddim", steps=_PUBLISHED_FIXED)
    ours, other = (float(psnr(images, expected).mean()) for images in (found, fixed))
    note = f"{calls:.1f} calls; other: {_PUBLISHED_FIXED} fixed; the ratio is that to {_ENOUGH_PSNR:g} dB"
    title = f"published setting {name}, {rule}"
    yield Row(f"{title}: PSNR", ours, other, "dB", ours / _ENOUGH_PSNR, 1.0, note=note)
    limits = (1.0, _PUBLISHED_AIM / _PUBLISHED_FIXED)
    yield Row(
        f"{title}: mean calls", calls, _PUBLISHED_FIXED, "", calls / _PUBLISHED_FIXED, *limits, lower_is_better=True
    )


def _equal_cost(
    name: str, config: Config, predict: Predict, expected: Tensor, solver: str, steps: tuple[int, ...]
) -> Row:
    """Errors beside those of fixed steps at as many calls, of several step counts."""
    ours, others, notes = [], [], []
    for count in steps:
        found, calls = _counted(config, predict, solver=solver, steps=count, dynamic_steps="spectrum")
        fixed, _ = _counted(config, predict, solver=solver, steps=round(calls))
        ours.append(rms(found, expected))
        others.append(rms(fixed, expected))
        notes.append(f"{calls:.1f}: {ours[-1] / others[-1]:.2f}")
    mean, other = (math.exp(sum(map(math.log, errors)) / len(errors)) for errors in (ours, others))
    title = f"dynamic steps {name}, {solver}: against fixed at as many calls"
    note = f"calls: ratio {', '.join(notes)}"
    return Row(title, mean, other, "rms", mean / other, 1.0, lower_is_better=True, note=note)


def _calls_to_enough(name: str, config: Config, predict: Predict, expected: Tensor, tried: range) -> Row:
    """The least mean number of calls of DDIM at which pictures are as near to the reference as was published."""

    def is_enough(images: Tensor) -> bool:
        return float(psnr(images, expected).mean()) >= _ENOUGH_PSNR

    def counted(steps: int, rule: str) -> float:
        images, calls = _counted(config, predict, solver="ddim", steps=steps, dynamic_steps=rule)
        return calls if is_enough(images) else math.inf

    ours, other = (min(counted(steps, rule) for steps in tried) for rule in ("spectrum", "none"))
    title = f"dynamic steps {name}: calls to {_ENOUGH_PSNR:g} dB"
    return Row(title, ours, other, "", ours / other, None, lower_is_better=True, note="other: fixed steps")


def _counted(config: Config, predict: Predict, **sampling: object) -> tuple[Tensor, float]:
    """Pictures and calls each; guidance asks twice a call."""
    counted = Counted(predict)
    images = sample(config, lambda: counted, _BATCH, **sampling)
    return images, counted.answers / _BATCH / (1 if config.sampling.guidance == 1 else 2)
