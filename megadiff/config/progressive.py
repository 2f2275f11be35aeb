"""Progressive training: the settings of each stage, in closed form. A stage is a whole run of its own settings."""

from dataclasses import dataclass
from typing import Any

from megadiff.config.schema import Config, ProgressiveStage
from megadiff.errors import ConfigError

# Without train.stages: half of the steps at a quarter of the size, three tenths at half of it, the rest at all of it.
_DEFAULT_STAGES = ((0.5, 4), (0.8, 2), (1.0, 1))


@dataclass(frozen=True)
class TrainingStage:
    """Consecutive steps with the same settings.

    Attributes:
        number: from 1.
        first_step, end_step: optimizer steps [first, end) that it trains, counted from 0.
        config: the settings of a run that is all like this stage.
    """

    number: int
    first_step: int
    end_step: int
    config: Config


def training_stages(config: Config) -> list[TrainingStage]:
    """The stages of a run in order; one stage that is the whole run unless train.progressive.

    Raises:
        ConfigError: the default stages do not divide model.input_size.
    """
    if not config.train.progressive:
        return [TrainingStage(1, 0, config.train.steps, config)]
    found, start = [], 0
    for number, stage in enumerate(_stages(config), start=1):
        end = round(stage.until * config.train.steps)
        found.append(TrainingStage(number, start, end, _stage_config(config, stage)))
        start = end
    return found


def stage_after(config: Config, steps: int) -> TrainingStage:
    """The stage that took the last of so many steps: what the weights of a checkpoint were trained for."""
    stages = training_stages(config)
    return next((stage for stage in stages if steps <= stage.end_step), stages[-1])


def _stages(config: Config) -> tuple[ProgressiveStage, ...]:
    if config.train.stages:
        return config.train.stages
    size = config.model.input_size
    if size % _DEFAULT_STAGES[0][1]:
        raise ConfigError(
            f"train.progressive = true trains at a quarter and half of model.input_size = {size}, which 4 does not "
            "divide; give train.stages"
        )
    return tuple(ProgressiveStage(until=until, input_size=size // factor) for until, factor in _DEFAULT_STAGES)


def _stage_config(config: Config, stage: ProgressiveStage) -> Config:
    model: dict[str, Any] = {"input_size": stage.input_size}
    if config.model.name == "dit" and stage.input_size != config.model.input_size:
        model["position_size"] = config.model.position_size or config.model.input_size
    train: dict[str, Any] = {"progressive": False, "stages": ()}
    if stage.global_batch_size is not None:
        train |= {"global_batch_size": stage.global_batch_size, "gradient_accumulation_steps": None}
    diffusion = {} if stage.shift is None else {"shift": stage.shift, "shift_base_tokens": 0}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "train": config.train.model_copy(update=train),
            "diffusion": config.diffusion.model_copy(update=diffusion),
            "optimizer": config.optimizer.model_copy(update={"lr": config.optimizer.lr * stage.lr_ratio}),
        }
    )
