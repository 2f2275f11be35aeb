"""Solvers of the diffusion ODE and SDE as coefficients: one update for each call of the network.

All predict x0, m below, and differ in how they continue it between two noise levels. With lambda = log(alpha / sigma)
and h its growth in a step from s to t,

    x_t = e^(h - g) sigma_t / sigma_s x_s + alpha_t integral over [0, h] of g/h e^(-g (h - r) / h) m(s + r) dr + noise

with g = h for the ODE and 2 h for the SDE (Lu et al. 2022, arXiv 2211.01095, equations 8 and 14). m is a polynomial of
lambda through the predictions of this and former levels: DPM-Solver++ of order k takes k of them, those of the last
steps (multi-step, "m") or of the same group of k steps from one state ("s"); UniPC (Zhao et al. 2023) also takes the
prediction at t to correct x_t once it is known, at no further call. Every solver ends at the last predicted x0, where
no noise is left, whatever its order. A new solver is one function and one line in SOLVERS.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megadiff.diffusion.schedule import NoiseSchedule


@dataclass(frozen=True)
class Level:
    """Amplitudes of signal and noise."""

    alpha: float
    sigma: float

    @property
    def log_ratio(self) -> float:
        """lambda; there is none in pure noise."""
        return math.log(self.alpha / self.sigma)


@dataclass(frozen=True)
class Update:
    """A call of the network and what follows it; the weights are those of `megadiff.ops.solver_step`.

    Attributes:
        level: number of the level at which the network is called.
        next_weights: of the base, this prediction, the last and the one before.
        corrector_weights: of the last base, the last prediction, the one before and this one; none without a corrector.
        noise: what is added, as (number of a draw, weight).
    """

    level: int
    next_weights: tuple[float, float, float, float]
    corrector_weights: tuple[float, float, float, float] | tuple[()] = ()
    noise: tuple[tuple[int, float], ...] = ()


Solver = Callable[[Sequence[Level]], list[Update]]

_FROM_LAST_BASE = (1.0, 0.0, 0.0, 0.0)


def levels_of(schedule: NoiseSchedule, timesteps: Sequence[int]) -> list[Level]:
    """The levels of a grid of timesteps, in its order."""
    alphas, sigmas = schedule.alpha.tolist(), schedule.sigma.tolist()
    return [Level(alphas[t], sigmas[t]) for t in timesteps]


def make_updates(solver: str, eta: float, levels: Sequence[Level]) -> list[Update]:
    """All updates of a run over falling noise levels, the last of which ends at x0.

    Args:
        solver: of SOLVERS.
        eta: noise of DDIM; other solvers have their own.
        levels: at which the network may be called, at least one.
    """
    updates = ddim(levels, eta) if solver == "ddim" else SOLVERS[solver](levels)
    return [*updates, Update(len(levels) - 1, (0.0, 1.0, 0.0, 0.0))]


def ddim(levels: Sequence[Level], eta: float) -> list[Update]:
    """Song et al. 2021, equation 12: eta 0 is deterministic, 1 is ancestral sampling (equation 16)."""
    updates = []
    for i, (start, end) in enumerate(_steps(levels)):
        left = start.alpha / end.alpha * end.sigma
        added = eta * end.sigma / start.sigma * math.sqrt(max(start.sigma**2 - left**2, 0.0))
        kept = math.sqrt(max(end.sigma**2 - added**2, 0.0)) / start.sigma
        weights = (kept, end.alpha - kept * start.alpha, 0.0, 0.0)
        updates.append(Update(i, weights, noise=((i, added),) if added else ()))
    return updates


def heun(levels: Sequence[Level]) -> list[Update]:
    """The trapezoidal rule on the straight line that any schedule is after x / (alpha + sigma); two calls a step.

    With y = x / (alpha + sigma) and w = sigma / (alpha + sigma) it is dy/dw = (y - m) / w (Karras et al. 2022,
    algorithm 1, for w instead of sigma), which pure noise does not trouble. On flow schedules w is time.
    """
    updates = []
    for i, (start, end) in enumerate(_steps(levels)):
        scale, end_scale = start.alpha + start.sigma, end.alpha + end.sigma
        w, end_w = start.sigma / scale, end.sigma / end_scale
        kept = end_w / w
        half = end_scale * (end_w - w) / 2
        updates.append(Update(i, (kept * end_scale / scale, end_scale * (1 - kept), 0.0, 0.0)))
        weights = (kept * end_scale / scale, -half / end_w, half * (1 / end_w - 2 / w), 0.0)
        updates.append(Update(i + 1, weights, _FROM_LAST_BASE))
    return updates


def multistep(levels: Sequence[Level], order: int, stochastic: bool = False) -> list[Update]:
    """DPM-Solver++(kM): continues the predictions of the last k levels."""
    updates = []
    for i, (start, end) in enumerate(_steps(levels)):
        kept, weights, noise = exponential_step(start, end, _nodes(levels, i, max(0, i - order + 1)), stochastic)
        updates.append(Update(i, (kept, *_three(weights)), noise=((i, noise),) if noise else ()))
    return updates


def singlestep(levels: Sequence[Level], order: int, stochastic: bool = False) -> list[Update]:
    """DPM-Solver++(kS): groups of k steps, all from the state at the group's first level.

    The noise of a group's states is one path: later states contain what was added to earlier ones.
    """
    updates: list[Update] = []
    first = 0
    path: list[tuple[int, float]] = []
    for i, (before, end) in enumerate(_steps(levels)):
        if i - first == order or levels[first].alpha == 0:
            first, path = i, []
        kept, weights, _ = exponential_step(levels[first], end, _nodes(levels, i, first), stochastic)
        last_kept, _, noise = exponential_step(before, end, [before], stochastic)
        path = [*((draw, weight * last_kept) for draw, weight in path), *([(i, noise)] if noise else [])]
        corrector = _FROM_LAST_BASE if i > first else ()
        updates.append(Update(i, (kept, *_three(weights)), corrector, tuple(path)))
    return updates


def unipc(levels: Sequence[Level]) -> list[Update]:
    """UniPC of order 2 with B(h) = e^h - 1: a two-step predictor, and a corrector through three predictions."""
    updates = []
    for i, (start, end) in enumerate(_steps(levels)):
        kept, weights, _ = exponential_step(start, end, _nodes(levels, i, max(0, i - 1)), stochastic=False)
        corrector: tuple[float, float, float, float] | tuple[()] = ()
        if i > 0 and levels[i - 1].alpha > 0:
            nodes = _nodes(levels, i, max(0, i - 2))
            last_kept, of_nodes, _ = exponential_step(levels[i - 1], start, nodes, stochastic=False)
            of_this, of_last, of_before = _three(of_nodes)
            corrector = (last_kept, of_last, of_before, of_this)
        updates.append(Update(i, (kept, *_three(weights)), corrector))
    return updates


def _steps(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
    return list(itertools.pairwise(levels))


def _nodes(levels: Sequence[Level], current: int, first: int) -> list[Level]:
    """The levels from `current` back to `first`; pure noise has no lambda and is left out, unless it is current."""
    return [levels[current], *(level for level in levels[first:current][::-1] if level.alpha > 0)]


def _three(weights: Sequence[float]) -> tuple[float, float, float]:
    padded = [*weights, 0.0, 0.0]
    return padded[0], padded[1], padded[2]


def exponential_step(
    start: Level, end: Level, nodes: Sequence[Level], stochastic: bool
) -> tuple[float, list[float], float]:
    """Weights of x at `start`, of the predictions at `nodes` and of fresh noise in x at `end`, which has noise.

    The polynomial through three nodes is integrated exactly. For two, the published solvers (DPM-Solver++(2M), UniPC's
    rho) put half of the integral of a constant where that of a line is a little more.
    """
    shrink = start.alpha * end.sigma / (end.alpha * start.sigma)  # e^-h
    decay = shrink if stochastic else 1.0
    kept = end.sigma / start.sigma * decay
    noise = end.sigma * math.sqrt(1.0 - shrink**2) if stochastic else 0.0
    if len(nodes) == 1:
        return kept, [end.alpha - kept * start.alpha], noise
    h = end.log_ratio - start.log_ratio
    g = 2 * h if stochastic else h
    constant = -math.expm1(-g)
    moments = [constant, constant / 2]
    if len(nodes) == 3:
        line = 1.0 - constant / g
        moments = [constant, line, 1.0 - 2 * line / g]
    places = torch.tensor([(node.log_ratio - start.log_ratio) / h for node in nodes], dtype=torch.float64)
    powers = torch.stack([places**power for power in range(len(nodes))])
    weights = torch.linalg.solve(powers, end.alpha * torch.tensor(moments, dtype=torch.float64))
    return kept, weights.tolist(), noise


SOLVERS: dict[str, Solver] = {
    "ddpm": partial(ddim, eta=1.0),
    "ddim": partial(ddim, eta=0.0),
    "euler": partial(ddim, eta=0.0),  # Euler's method on the straight line of `heun`
    "heun": heun,
    "dpmpp_1": partial(multistep, order=1),
    "dpmpp_2m": partial(multistep, order=2),
    "dpmpp_3m": partial(multistep, order=3),
    "dpmpp_2s": partial(singlestep, order=2),
    "dpmpp_3s": partial(singlestep, order=3),
    "dpmpp_1_sde": partial(multistep, order=1, stochastic=True),
    "dpmpp_2m_sde": partial(multistep, order=2, stochastic=True),
    "dpmpp_3m_sde": partial(multistep, order=3, stochastic=True),
    "dpmpp_2s_sde": partial(singlestep, order=2, stochastic=True),
    "dpmpp_3s_sde": partial(singlestep, order=3, stochastic=True),
    "unipc": unipc,
}
