"""Solvers on trained networks: how near few calls come to the end of the flow, beside many of DDIM."""

from collections.abc import Iterator
from functools import partial

from report import Row
from sampling_rows.networks import predict_of, reference, rms, sample, trained

_BATCH = 16
_TRIED = (
    ("ddim", 50),
    ("ddim", 20),
    ("dpmpp_2m", 10),
    ("dpmpp_2m", 15),
    ("dpmpp_2m", 20),
    ("unipc", 10),
    ("unipc", 20),
)


def rows(quick: bool) -> Iterator[Row]:
    """Information for the table of recommended settings."""
    ddim_steps = 10 if quick else 100
    for name in ("dit", "unet"):
        config, chain = trained(name, quick)
        opened, expected = partial(predict_of, chain), reference(name, quick, _BATCH)
        other = rms(sample(config, opened, _BATCH, solver="ddim", steps=ddim_steps), expected)
        for solver, steps in _TRIED[-1:] if quick else _TRIED:
            ours = rms(sample(config, opened, _BATCH, solver=solver, steps=steps), expected)
            title = f"trained {name}: {solver} in {steps} calls against ddim in {ddim_steps}"
            yield Row(title, ours, other, "rms", ours / other, None, lower_is_better=True)
