"""Rules of the quality figures during training."""

from megadiff.config.checks import Check, Idle, refuse_idle
from megadiff.config.schema import Config
from megadiff.errors import ConfigError

_INCEPTION = "inception"


def _evaluation_sees_pictures(config: Config) -> None:
    every, model, data = config.monitor.evaluate_every_steps, config.model, config.data
    if every == 0 or (data.name != "latents" and model.in_channels in (1, 3)):
        return
    raise ConfigError(
        f"monitor.evaluate_every_steps = {every} compares pictures, but data.name = {data.name} with "
        f"model.in_channels = {model.in_channels} gives latents; use evaluate_every_steps = 0 and judge decoded "
        "pictures with megadiff evaluate"
    )


def _inception_has_weights(config: Config) -> None:
    if config.monitor.evaluate_features == _INCEPTION and not config.monitor.evaluate_weights:
        raise ConfigError(
            f"monitor.evaluate_features = {_INCEPTION} needs monitor.evaluate_weights, which is not set; give "
            "pt_inception-2015-12-05-6726825d.pth"
        )


def _no_idle_evaluation_settings(config: Config) -> None:
    features, off = config.monitor.evaluate_features, config.monitor.evaluate_every_steps == 0
    never = "monitor.evaluate_every_steps = 0; remove it, or use for example evaluate_every_steps = 500"
    other = f"monitor.evaluate_features = {features}; remove it, or use evaluate_features = {_INCEPTION}"
    refuse_idle(
        config,
        (
            *(Idle("monitor", f"evaluate_{name}", off, never) for name in ("images", "features", "weights")),
            Idle("monitor", "evaluate_weights", features != _INCEPTION, other),
        ),
    )


MONITOR_CHECKS: tuple[Check, ...] = (
    _evaluation_sees_pictures,
    _inception_has_weights,
    _no_idle_evaluation_settings,
)
