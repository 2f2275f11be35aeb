"""Rules between settings. Each check is one function in a table and raises one sentence with values and remedy."""

from megadiff.config.checks import Check, Idle, refuse_idle, shown
from megadiff.config.schema import Config, DataConfig, OptimizerConfig
from megadiff.config.validate_diffusion import DIFFUSION_CHECKS
from megadiff.config.validate_models import MODEL_CHECKS
from megadiff.config.validate_monitor import MONITOR_CHECKS
from megadiff.config.validate_parallel import PARALLEL_CHECKS
from megadiff.config.validate_progressive import PROGRESSIVE_CHECKS, check_stages
from megadiff.config.validate_sampling import SAMPLING_CHECKS
from megadiff.errors import ConfigError

_EMOJI_PIXELS = 72
# Channels that each source of pictures can be loaded with; sources that are not listed have any number.
_PICTURE_CHANNELS = {"emoji": (3,), "fashion_mnist": (1, 3), "image_folder": (1, 3)}
_NEEDS_PATH = ("fashion_mnist", "image_folder", "latents")


def _channels_fit_data(config: Config) -> None:
    model, data = config.model, config.data
    allowed = _PICTURE_CHANNELS.get(data.name)
    if allowed is None or model.in_channels in allowed:
        return
    network = f"model.preset = {model.preset}" if model.preset else "the network"
    raise ConfigError(
        f"{network} has model.in_channels = {model.in_channels} (latents), but data.name = {data.name} gives "
        "pixels; "
        f"use data.name = latents with data.path, or model.in_channels = {allowed[-1]}"
    )


def _data_has_path(config: Config) -> None:
    if config.data.name in _NEEDS_PATH and not config.data.path:
        raise ConfigError(f"data.name = {config.data.name} needs data.path, which is not set; give the folder")


def _emoji_size(config: Config) -> None:
    if config.data.name == "emoji" and config.model.input_size > _EMOJI_PIXELS:
        raise ConfigError(
            f"model.input_size = {config.model.input_size} is above the {_EMOJI_PIXELS} pixels of data.name "
            "= emoji; "
            f"use at most {_EMOJI_PIXELS}"
        )


def _augmentation_has_meaning(config: Config) -> None:
    default = DataConfig()
    for name in ("flip", "random_crop", "hsv_jitter"):
        value, off = getattr(config.data, name), getattr(default, name)
        if value != off and config.data.name in ("latents", "ids"):
            raise ConfigError(
                f"data.{name} = {shown(value)} has no meaning for data.name = {config.data.name}; remove it (latents "
                "of changed pictures are stored, not computed)"
            )


def _jitter_needs_colours(config: Config) -> None:
    if any(config.data.hsv_jitter) and config.model.in_channels != 3:
        raise ConfigError(
            f"data.hsv_jitter = {list(config.data.hsv_jitter)} needs colours, but model.in_channels = "
            f"{config.model.in_channels}; use in_channels = 3 or remove it"
        )


def _balance_needs_classes(config: Config) -> None:
    if config.data.balanced and config.model.condition != "class":
        raise ConfigError(
            f"data.balanced = true shows classes equally often, but model.condition = {config.model.condition}; use "
            "balanced = false"
        )


def _warmup_has_one_unit(config: Config) -> None:
    steps, epochs = config.optimizer.warmup_steps, config.optimizer.warmup_epochs
    if epochs > 0 and steps != OptimizerConfig().warmup_steps:
        raise ConfigError(f"optimizer.warmup_steps = {steps} and optimizer.warmup_epochs = {epochs} differ; give one")


def _warmup_ends_before_run(config: Config) -> None:
    if config.optimizer.warmup_epochs > 0:
        return  # known with the data: see warmup.py
    warmup, steps = config.optimizer.warmup_steps, config.train.steps
    if warmup >= steps:
        raise ConfigError(
            f"optimizer.warmup_steps = {warmup} is not below train.steps = {steps}; use at most {steps - 1}"
        )


def _stop_within_horizon(config: Config) -> None:
    stop, steps = config.train.stop_at_step, config.train.steps
    if stop is not None and stop > steps:
        raise ConfigError(f"train.stop_at_step = {stop} is after train.steps = {steps}; use at most {steps}")


def _flash_needs_half(config: Config) -> None:
    backend, precision = config.train.attention_backend, config.train.precision
    if backend in ("flash", "flash_attn") and precision not in ("bf16", "fp16"):
        raise ConfigError(
            f"train.attention_backend = {backend} has no {precision} kernel; use train.precision = bf16 or "
            "attention_backend = auto"
        )


def _betas_below_one(config: Config) -> None:
    for index, beta in enumerate(config.optimizer.betas):
        if not 0 <= beta < 1:
            raise ConfigError(f"optimizer.betas[{index}] = {beta} is outside [0, 1); use for example [0.9, 0.999]")


def _apex_fits(config: Config) -> None:
    name = config.optimizer.name
    if name != "apex_fused_adam":
        return
    if config.parallel.zero_stage == 3:
        raise ConfigError(
            f"optimizer.name = {name} counts its steps once for all of a group, but parallel.zero_stage = 3 steps a "
            "group in parts; use zero_stage = 2 or optimizer.name = adamw_ema"
        )
    offload = config.deepspeed.get("zero_optimization", {}).get("offload_optimizer", {})
    if offload.get("device") == "cpu":
        raise ConfigError(
            f"optimizer.name = {name} runs on CUDA only, but zero_optimization.offload_optimizer.device = cpu keeps "
            "its state on the CPU; remove the offload or use optimizer.name = adamw_ema"
        )
    if config.train.precision == "fp64":
        raise ConfigError(f"optimizer.name = {name} has no train.precision = fp64; use optimizer.name = adamw")


def _norm_backend_has_a_norm(config: Config) -> None:
    if config.train.norm_backend != "apex" or config.model.qk_norm:
        return
    is_dit = config.model.name == "dit"
    cause = "model.qk_norm = false, because no other norm is" if is_dit else "model.name = unet, whose norms are not"
    raise ConfigError(
        f"train.norm_backend = apex has no effect with {cause} an RMSNorm; use norm_backend = torch"
        f"{' or qk_norm = true' if is_dit else ''}"
    )


def _no_idle_settings(config: Config) -> None:
    sgd, lion = config.optimizer.name == "sgd", config.optimizer.name == "lion"
    emoji, ids = config.data.name == "emoji", config.data.name == "ids"
    dit, still = config.model.name == "dit", config.optimizer.final_fraction == 0
    optimizer, data = f"optimizer.name = {config.optimizer.name}", f"data.name = {config.data.name}"
    classes = "data.classes, which names its groups itself; remove one of them"
    refuse_idle(
        config,
        (
            Idle("optimizer", "momentum", not sgd, f"{optimizer}; use betas, or optimizer.name = sgd"),
            Idle("optimizer", "betas", sgd, "optimizer.name = sgd; use momentum, or optimizer.name = adamw"),
            Idle("optimizer", "eps", lion, "optimizer.name = lion, which divides by nothing; remove it"),
            Idle("optimizer", "clip_every_steps", config.optimizer.clip_norm == 0, "optimizer.clip_norm = 0"),
            Idle("optimizer", "final_lr_ratio", still, "final_fraction = 0; use for example final_fraction = 0.1"),
            Idle("optimizer", "path_lr_ratios", dit, "model.name = dit, which has no ways down and up; remove it"),
            Idle("optimizer", "eps", sgd, "optimizer.name = sgd; remove it, or use optimizer.name = adamw"),
            Idle("data", "num_samples", not ids, f"{data}; remove it, or use data.name = ids"),
            Idle("data", "grouping", not emoji, f"{data}; remove it, or use data.name = emoji"),
            Idle("data", "grouping", emoji and bool(config.data.classes), classes),
        ),
    )


CHECKS: tuple[Check, ...] = (
    _channels_fit_data,
    _data_has_path,
    _emoji_size,
    _augmentation_has_meaning,
    _jitter_needs_colours,
    _balance_needs_classes,
    _warmup_has_one_unit,
    _warmup_ends_before_run,
    _stop_within_horizon,
    _flash_needs_half,
    _betas_below_one,
    _apex_fits,
    _norm_backend_has_a_norm,
    _no_idle_settings,
)


def checks_for(network: str) -> tuple[Check, ...]:
    """All rules for a network, by its model.name, in the order in which they are checked."""
    return (
        *MODEL_CHECKS[network],
        *DIFFUSION_CHECKS,
        *SAMPLING_CHECKS,
        *CHECKS,
        *MONITOR_CHECKS,
        *PARALLEL_CHECKS[network],
        *PROGRESSIVE_CHECKS,
    )


def validate(config: Config) -> None:
    """Check all rules between settings, of every stage as well; the first one that is broken raises ConfigError."""
    checks = checks_for(config.model.name)
    for check in checks:
        check(config)
    check_stages(config, checks)
