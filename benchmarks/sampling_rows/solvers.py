"""Solvers on a known distribution: error against the exact flow, and how it falls with the number of calls."""

import math
from collections.abc import Iterator

from report import Row
from sampling_rows.mixture import NARROW, WIDE

from megadiff.diffusion.schedule import make_schedule

# solver, calls, and what it is compared with; must and aim of the ratio of errors.
_PAIRS = (
    ("dpmpp_2m", 15, 100, 1.05, None),
    ("unipc", 20, 250, 1.0, None),
    ("unipc", 10, 100, None, 1.05),
    ("dpmpp_3m", 15, 100, None, None),
    ("heun", 15, 100, None, None),
)
_ORDERS = {"ddim": 1, "heun": 2, "dpmpp_2m": 2, "dpmpp_2s": 2, "dpmpp_3m": 3, "dpmpp_3s": 3, "unipc": 3}


_FINE = 100_000  # timesteps: whole ones of a coarse schedule disturb the higher orders


def rows(quick: bool) -> Iterator[Row]:
    """Errors with DDIM's at many steps beside them, then orders of convergence."""
    for solver, calls, ddim_calls, must, aim in _PAIRS:
        for name, mixture in (("wide", WIDE), ("narrow", NARROW)):
            for schedule_name in ("flow", "cosine"):
                schedule = make_schedule(schedule_name, 1000)
                ours = mixture.error(solver, schedule, "trailing", calls)
                other = mixture.error("ddim", schedule, "trailing", ddim_calls)
                limits = (must, aim) if name == "wide" else (None, None)
                title = f"{solver} in {calls} calls against ddim in {ddim_calls}: {name} mixture, {schedule_name}"
                yield Row(title, ours, other, "rms", ours / other, *limits, lower_is_better=True)
    for solver, order in _ORDERS.items():
        grid, name = ("trailing", "flow") if solver == "heun" else ("exponential", "hybrid")
        schedule, calls = make_schedule(name, _FINE), 31 if solver == "heun" else 16
        coarse, fine = (WIDE.error(solver, schedule, grid, count) for count in (calls, 2 * calls + calls % 2))
        found = math.log2(coarse / fine)
        yield Row(f"order of {solver}", found, order, "", found / order, 0.8)
