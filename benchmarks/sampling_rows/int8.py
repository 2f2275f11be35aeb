"""What int8 weights do to small trained networks: memory, time of a call, and samples against the float network's."""

import copy
import statistics
import time
from collections.abc import Iterator

import torch
from report import Row
from sampling_rows.networks import predict_of, psnr, sample, trained
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.models.chain import Chain
from megadiff.models.int8 import held_bytes, quantize_int8

_SOLVER, _STEPS = "dpmpp_2m", 20
_IMAGES, _BATCH = 24, 24
_CALLS = 10  # of each network in turns, for the time of one


def rows(quick: bool) -> Iterator[Row]:
    """Three rows for a DiT and for a UNet."""
    for name in ("dit", "unet"):
        config, chain = trained(name, quick)
        ours = copy.deepcopy(chain)
        is_reduced = quantize_int8(ours)
        after, before = held_bytes(ours), held_bytes(chain)
        yield Row(f"int8 {name}: memory", after, before, "bytes", after / before, 0.49, 0.3, lower_is_better=True)
        seconds, plain_seconds = _seconds_of_a_call(config, ours, chain, 3 if quick else _CALLS)
        ratio = seconds / plain_seconds
        title = f"int8 {name}: time of a call, batch {_BATCH}"
        yield Row(title, 1e3 * seconds, 1e3 * plain_seconds, "ms", ratio, None, lower_is_better=True)
        yield _quality(name, config, ours, chain, 4 if quick else _IMAGES, is_reduced)


def _quality(name: str, config: Config, ours: Chain, chain: Chain, count: int, is_reduced: bool) -> Row:
    """Beside the samples of int8 weights those of one step less, whose difference nobody minds."""
    expected = _samples(config, chain, _STEPS, count)
    values = psnr(_samples(config, ours, _STEPS, count), expected)
    mean, fewer = values.mean().item(), psnr(_samples(config, chain, _STEPS - 1, count), expected).mean().item()
    bits = ", 7 bits in linear layers, as this CPU has no VNNI" if is_reduced else ""
    return Row(
        f"int8 {name}: PSNR of samples, {_SOLVER}, {_STEPS} steps",
        mean,
        fewer,
        "dB",
        mean,
        30.0,
        35.0,
        note=f"mean over {count} samples, the worst has {values.min().item():.1f} dB{bits}; "
        f"other: the float network with {_STEPS - 1} steps; limits are of the PSNR itself",
    )


def _samples(config: Config, chain: Chain, steps: int, count: int) -> Tensor:
    return sample(config, lambda: predict_of(chain), count, solver=_SOLVER, steps=steps)


@torch.no_grad()
def _seconds_of_a_call(config: Config, ours: Chain, chain: Chain, calls: int) -> tuple[float, float]:
    """Medians over calls in turns, so that a busy machine slows both."""
    model = config.model
    x_t = torch.randn(_BATCH, model.in_channels, model.input_size, model.input_size)
    inputs = (x_t, torch.full((_BATCH,), 500), torch.arange(_BATCH) % model.num_classes)
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(calls):
        for index, network in enumerate((ours, chain)):
            started = time.perf_counter()
            network(inputs)
            seconds[index].append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])
