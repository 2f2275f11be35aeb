"""What is compared: the plain recipe, and one change to it a row. A recipe is the settings in which it differs."""

from collections.abc import Callable, Mapping
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


def combine(
    rows: Mapping[str, Settings], gains: Mapping[str, float], is_allowed: Callable[[Settings], bool]
) -> tuple[Settings, list[str]]:
    """Put together what helped, the best first; of rows that want different values of one setting the better stays.

    Args:
        rows: settings by recipe.
        gains: how many times fewer steps each takes than the plain one; those below HELPS_FROM are left out.
        is_allowed: whether a run may have these settings together.

    Returns:
        The settings together, and the names of the rows that are in them.
    """
    together: dict[str, Any] = {}
    names: list[str] = []
    for name in sorted(gains, key=lambda name: -gains[name]):
        settings = rows[name]
        agrees = all(together.get(key, value) == value for key, value in settings.items())
        if gains[name] >= HELPS_FROM and agrees and is_allowed({**together, **settings}):
            together |= settings
            names.append(name)
    return together, names
