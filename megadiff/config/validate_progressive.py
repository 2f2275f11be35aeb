"""Rules of progressive training. Each stage must be a run that could be trained by itself."""

from collections.abc import Iterable
from itertools import pairwise

from megadiff.config.checks import Check, Idle, refuse_idle, shown
from megadiff.config.progressive import training_stages
from megadiff.config.schema import Config
from megadiff.errors import ConfigError


def _stages_are_wanted(config: Config) -> None:
    off = not config.train.progressive
    refuse_idle(config, [Idle("train", "stages", off, "train.progressive = false; use progressive = true")])


def _stages_are_in_order(config: Config) -> None:
    ends = [stage.until for stage in config.train.stages]
    if ends and (ends[-1] != 1.0 or any(later <= earlier for earlier, later in pairwise(ends))):
        raise ConfigError(
            f"train.stages end at {shown(tuple(ends))} of train.steps, which are not in rising order up to 1; use for "
            "example until = 0.5, 0.8 and 1.0"
        )


def _stages_have_steps(config: Config) -> None:
    for stage in training_stages(config):
        if stage.end_step <= stage.first_step:
            raise ConfigError(
                f"train.stages[{stage.number - 1}] has no step: train.steps = {config.train.steps} ends it at step "
                f"{stage.end_step}, where it starts; use more steps or fewer stages"
            )


PROGRESSIVE_CHECKS: tuple[Check, ...] = (_stages_are_wanted, _stages_are_in_order, _stages_have_steps)


def check_stages(config: Config, checks: Iterable[Check]) -> None:
    """Check the settings of every stage by the rules of a run; the message says which stage it is."""
    if not config.train.progressive:
        return
    for stage in training_stages(config):
        for check in checks:
            try:
                check(stage.config)
            except ConfigError as error:
                raise ConfigError(f"train.stages[{stage.number - 1}]: {error}") from error
