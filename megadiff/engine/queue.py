"""Works off a list of pictures: batches over the data-parallel ranks, files as they are ready, done ones left out."""

import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from megadiff.diffusion.condition import stack_conditions
from megadiff.dist.agree import on_first
from megadiff.engine.inference import Network
from megadiff.sampling.dynamic import DynamicSampler
from megadiff.sampling.images import METADATA_KEY, save_png
from megadiff.sampling.requests import Line, batches
from megadiff.sampling.sampler import Sampler, initial_noise, sampler_of


@dataclass(frozen=True)
class Queue:
    """What the pictures of a list have in common.

    Attributes:
        folder: for the files.
        source: which weights the network has; a picture of other weights or settings is made anew.
        batch_size: most images at once on one rank.
        streams: batches under way at once on a CUDA device.
        empty_cache_every: gives unused device memory back after so many images; 0 never.
    """

    folder: Path
    source: Mapping[str, str]
    batch_size: int
    streams: int = 1
    empty_cache_every: int = 0


def run_queue(network: Network, queue: Queue, lines: Sequence[Line]) -> int:
    """Makes the pictures that the folder does not have yet, and returns how many; a collective call."""
    missing = on_first(lambda: [line.number for line in lines if not _is_done(line, queue)])
    wanted = set(missing)
    grid = network.grid
    todo = batches([line for line in lines if line.number in wanted], queue.batch_size, grid.data.degree)
    mine = todo[grid.data.index :: grid.data.degree]
    is_writer = grid.tensor.index == 0 and grid.pipe.index == 0
    progress = _Progress(sum(map(len, mine)), is_writer and grid.data.index == 0)
    made = 0
    for batch, images in _in_flight(network, mine, queue.streams):
        if is_writer:
            for line, image in zip(batch, images.cpu(), strict=True):
                _write(line, image, queue)
        progress.add(len(batch))
        if queue.empty_cache_every and made // queue.empty_cache_every < (made + len(batch)) // queue.empty_cache_every:
            torch.cuda.empty_cache()
        made += len(batch)
    progress.close()
    return len(missing)


def metadata(line: Line, queue: Queue) -> str:
    """What a picture's file says about it, as JSON."""
    values = {"condition": line.name, "seed": line.seed, "image": line.image, **queue.source}
    return json.dumps(values | {"sampling": line.sampling.model_dump(mode="json")}, sort_keys=True)


def _in_flight(network: Network, todo: Sequence[list[Line]], streams: int) -> Iterator[tuple[list[Line], Tensor]]:
    """Batches with their images, several of which are computed at once where there are streams."""
    on_device = network.device.type == "cuda"
    ready = [torch.cuda.Stream(network.device) for _ in range(streams)] if on_device else []
    for stream in ready:
        stream.wait_stream(torch.cuda.current_stream(network.device))  # the weights are there
    under_way: deque[tuple[list[Line], Tensor]] = deque()
    samplers: dict[str, Sampler | DynamicSampler] = {}
    for number, batch in enumerate(todo):
        with torch.cuda.stream(ready[number % streams]) if ready else contextlib.nullcontext():
            under_way.append((batch, _sample(network, batch, samplers)))
        if len(under_way) >= streams:
            if ready:
                ready[(number + 1 - streams) % streams].synchronize()
            yield under_way.popleft()
    if ready:
        torch.cuda.synchronize(network.device)
    yield from under_way


def _sample(network: Network, batch: Sequence[Line], samplers: dict[str, Sampler | DynamicSampler]) -> Tensor:
    config, model, device = network.config, network.config.model, network.device
    key = batch[0].sampling.model_dump_json()
    if key not in samplers:
        samplers[key] = sampler_of(config.model_copy(update={"sampling": batch[0].sampling}))
    conditions = stack_conditions([line.condition for line in batch]).to(device)
    seeds, image_ids = (
        torch.tensor([getattr(line, name) for line in batch], device=device) for name in ("seed", "image")
    )
    noise = initial_noise(seeds, image_ids, (model.in_channels, model.input_size, model.input_size))
    return samplers[key](network.open_predict(batch[0].sampling.cache_threshold), noise, conditions, seeds, image_ids)


def _write(line: Line, image: Tensor, queue: Queue) -> None:
    """Whole or not at all: what an interrupted run leaves is no picture."""
    path = queue.folder / line.file_name
    partial = path.with_suffix(".partial")
    save_png(image, partial, metadata(line, queue))
    os.replace(partial, path)


def _is_done(line: Line, queue: Queue) -> bool:
    path = queue.folder / line.file_name
    try:
        with Image.open(path) as picture:
            return picture.info.get(METADATA_KEY) == metadata(line, queue)
    except OSError:
        return False


class _Progress:
    """A bar on a terminal, a line now and then elsewhere; of this rank's share, with the time left."""

    _EVERY_SECONDS = 10.0

    def __init__(self, total: int, is_shown: bool) -> None:
        self._total, self._is_shown, self._done = total, is_shown, 0
        self._started = self._last = time.perf_counter()
        on_terminal = is_shown and sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="image") if on_terminal else None

    def add(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._is_shown and time.perf_counter() - self._last >= self._EVERY_SECONDS:
            self._last = time.perf_counter()
            left = (self._last - self._started) / self._done * (self._total - self._done)
            print(f"{self._done} of {self._total} images on this rank, {left:.0f} s left", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
