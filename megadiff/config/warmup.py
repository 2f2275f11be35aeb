"""A warm-up that is given in epochs, once the data are known."""

from megadiff.config.schema import Config
from megadiff.errors import ConfigError


def with_warmup_steps(config: Config, num_samples: int) -> Config:
    """The config with optimizer.warmup_epochs as optimizer.warmup_steps, rounded to the nearest step.

    Args:
        config: of the run; an epoch is counted at its global batch, not at those of progressive stages.
        num_samples: of the data set.

    Raises:
        ConfigError: the warm-up takes the whole run.
    """
    epochs, steps = config.optimizer.warmup_epochs, config.train.steps
    if epochs == 0:
        return config
    warmup = round(epochs * num_samples / config.train.global_batch_size)
    if warmup >= steps:
        raise ConfigError(
            f"optimizer.warmup_epochs = {epochs} of {num_samples} samples are {warmup} steps, not below train.steps = "
            f"{steps}; use fewer epochs or optimizer.warmup_steps"
        )
    return config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"warmup_steps": warmup, "warmup_epochs": 0.0})}
    )
