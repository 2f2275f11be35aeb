"""What is compared: the plain recipe, and one change to it a row. A recipe is the settings in which it differs."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Settings = Mapping[str, Any]

PLAIN, ALL_THAT_HELPED = "plain", "all that helped"
HELPS_FROM = 1.05  # a row of fewer times as fast is within the noise of three seeds

PLAIN_SETTINGS: Settings = MappingProxyType(
    {
        "diffusion.schedule": "linear",
        "diffusion.prediction": "eps",
        "optimizer.lr": 1e-3,
        "optimizer.betas": (0.9, 0.99),
        "optimizer.lr_schedule": "constant",
        "optimizer.weight_decay": 0.01,
        "ema.decay": 0.99,
        "sampling.guidance": 1.0,
        "sampling.clip_x0": True,
    }
)


def recipes(stages: list[dict[str, Any]]) -> dict[str, Settings]:
    """All rows but the last, the plain one first.

    Args:
        stages: of the progressive row, see `train.stages`.
    """
    return {
        PLAIN: {},
        "cosine": {"diffusion.schedule": "cosine"},
        "hybrid": {"diffusion.schedule": "hybrid"},
        "v": {"diffusion.prediction": "v"},
        "flow": {"diffusion.schedule": "flow", "diffusion.prediction": "flow"},
        "min-SNR": {"diffusion.loss_weight": "min_snr"},
        "importance": {"diffusion.importance": "density", "diffusion.importance_density": "loss"},
        "adaptive": {"diffusion.timestep_sampling": "adaptive"},
        "progressive": {"train.progressive": True, "train.stages": stages},
        "last-10 % drop": {"optimizer.final_fraction": 0.1},
        "Lion": {"optimizer.name": "lion", "optimizer.lr": 2e-4, "optimizer.weight_decay": 0.05},
        "gated skip": {"model.skip": "gated"},
    }


def merged(rows: Mapping[str, Settings], names: Sequence[str]) -> Settings | None:
    """The settings of several rows together; None where two want different values of one setting."""
    together: dict[str, Any] = {}
    for name in names:
        if any(together.get(key, value) != value for key, value in rows[name].items()):
            return None
        together |= rows[name]
    return together


def combine(
    rows: Mapping[str, Settings],
    gains: Mapping[str, float],
    is_allowed: Callable[[Settings], bool],
    measure: Callable[[list[str], Settings], float],
) -> list[str]:
    """Put together what helps, by trial: the best row, then the next best, each kept if the whole is faster with it.

    Args:
        rows: settings by recipe.
        gains: how many times fewer steps each takes than the plain one; those below HELPS_FROM are not tried.
        is_allowed: whether a run may have these settings together.
        measure: trains with the settings of several rows and returns their gain together.

    Returns:
        The names of the rows that stayed, none if no row helps.
    """
    names: list[str] = []
    best = HELPS_FROM
    for name in sorted((name for name in gains if gains[name] >= HELPS_FROM), key=lambda name: -gains[name]):
        trial = [*names, name]
        together = merged(rows, trial)
        if together is None or not is_allowed(together):
            continue
        reached = measure(trial, together) if names else gains[name]
        if reached >= best:
            names, best = trial, reached
    return names
