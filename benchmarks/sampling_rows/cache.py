"""The feature cache: time and error, beside as many fewer steps of the same solver as take the same time."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

from report import Row
from sampling_rows.networks import predict_of, relative_error, sample, trained
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.models.chain import Chain
from megadiff.models.feature_cache import FeatureCache, HitRate, cached_parts
from megadiff.sampling.guidance import Predict

_STEPS, _BATCH = 50, 16
_THRESHOLDS = {"dit": 0.9995, "unet": 0.98}
_LIMITS = {"dit": (1.5, 2.0), "unet": (1.8, 2.3)}  # must and aim of how many times faster
_WORST = 0.05


def rows(quick: bool) -> Iterator[Row]:
    """Three rows a network; times are medians of CPU time, which other programs disturb less, taken in turns."""
    steps, repeats = (8, 1) if quick else (_STEPS, 5)
    for name, threshold in _THRESHOLDS.items():
        config, chain = trained(name, quick)
        rate = HitRate()
        opened = (partial(predict_of, chain), partial(_cached, chain, config, threshold, rate))
        runs = [[_timed(config, steps, way) for way in opened] for _ in range(repeats)]
        (plain, _), (found, _) = runs[0]
        plain_seconds, seconds = (statistics.median(run[way][1] for run in runs) for way in (0, 1))
        speed, error = plain_seconds / seconds, relative_error(found, plain)
        title = f"feature cache {name}: {threshold}, {rate.share:.0%} reused"
        yield Row(title, seconds, plain_seconds, "s", speed, *_LIMITS[name])
        count = min(steps - 1, max(1, round(steps / speed)))
        fewer, _ = _timed(config, count, partial(predict_of, chain))
        other = relative_error(fewer, plain)
        note = f"other: {count} of {steps} steps"
        title = f"feature cache {name}: error against fewer steps in the same time"
        yield Row(title, error, other, "relative L2", error / other, 1.0, lower_is_better=True, note=note)
        title = f"feature cache {name}: error against the most allowed"
        yield Row(title, error, _WORST, "relative L2", error / _WORST, 1.0, lower_is_better=True)


def _cached(chain: Chain, config: Config, threshold: float, rate: HitRate) -> Predict:
    cache = FeatureCache(cached_parts(chain, config.model), threshold, rate)

    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        return cache((x_t, t, labels))

    return predict


def _timed(config: Config, steps: int, open_predict: Callable[[], Predict]) -> tuple[Tensor, float]:
    started = time.process_time()
    images = sample(config, open_predict, _BATCH, solver="ddim", steps=steps)
    return images, time.process_time() - started
