"""What the sampler's loop costs beside the network."""

import statistics
import time
from collections.abc import Iterator

import torch
from report import Row
from torch import Tensor

from megadiff.config.load import load_config
from megadiff.models.build import build_network
from megadiff.models.chain import Chain
from megadiff.sampling.generate import ImageRequest, generate

_BATCH = 16


class TimedNetwork:
    """A `predict` function that adds up its own time.

    Attributes:
        seconds: spent in the network.
    """

    def __init__(self, chain: Chain) -> None:
        self.seconds = 0.0
        self._chain = chain

    def opened(self) -> "TimedNetwork":
        """Itself, for a batch: it remembers nothing."""
        return self

    @torch.no_grad()
    def __call__(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        started = time.perf_counter()
        answer = self._chain((x_t, t, labels))
        self.seconds += time.perf_counter() - started
        return answer


def rows(quick: bool) -> Iterator[Row]:
    """Share of a 20-step loop that is not spent in the network, for a solver without and one with a memory."""
    for solver in ("ddim", "unipc"):
        config = load_config(None, {"model.preset": "dit-small-cpu", "sampling.solver": solver, "sampling.steps": 20})
        chain = build_network(config.model, seed=0).eval()
        request = ImageRequest([0] * _BATCH, range(_BATCH), seed=0)
        shares, totals = [], []
        for _ in range(1 if quick else 5):
            network = TimedNetwork(chain)
            started = time.perf_counter()
            generate(request, config, network.opened, torch.device("cpu"), 0, 1, lambda part: part)
            totals.append(time.perf_counter() - started)
            shares.append(1 - network.seconds / totals[-1])
        share, total = statistics.median(shares), statistics.median(totals)
        title = f"time outside the network, {solver}, 20 steps, batch {_BATCH}"
        yield Row(title, 1e3 * share * total, 1e3 * total, "ms", share, 0.10, 0.03, lower_is_better=True)
