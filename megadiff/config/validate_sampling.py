"""Rules between the settings of sampling, and between them and the network's training."""

from megadiff.config.checks import Check, Idle, refuse_idle, shown
from megadiff.config.networks import cached_level, deciding_blocks
from megadiff.config.schema import Config
from megadiff.errors import ConfigError

DYNAMIC_SOLVERS = ("ddim", "euler", "dpmpp_1", "dpmpp_2m")


def _guidance_needs_condition_dropout(config: Config) -> None:
    guidance = config.sampling.guidance
    if guidance != 1 and config.diffusion.condition_dropout == 0:
        raise ConfigError(
            f"sampling.guidance = {guidance} needs a network that was trained without its condition at times, but "
            "diffusion.condition_dropout = 0; use condition_dropout = 0.1 or guidance = 1"
        )


def _guidance_acts_somewhere(config: Config) -> None:
    low, high = config.sampling.guidance_interval
    if low >= high:
        raise ConfigError(
            f"sampling.guidance_interval = {shown(config.sampling.guidance_interval)} is empty; use two rising shares "
            "of time, for example [0.2, 0.8]"
        )


def _sampling_steps_exist(config: Config) -> None:
    steps, train = config.sampling.steps, config.diffusion.num_train_timesteps
    if steps > train:
        raise ConfigError(
            f"sampling.steps = {steps} is above diffusion.num_train_timesteps = {train}; use at most {train}"
        )


def _cache_sees_whole_features(config: Config) -> None:
    """Reuse is decided by whole features of each picture, and skips layers on this rank alone."""
    threshold, parallel = config.sampling.cache_threshold, config.parallel
    if threshold == 1:
        return
    stages = parallel.pipeline_model_parallel_size
    if stages > 1:
        raise ConfigError(
            f"sampling.cache_threshold = {threshold} does not work with parallel.pipeline_model_parallel_size = "
            f"{stages}; use cache_threshold = 1 or pipeline_model_parallel_size = 1"
        )
    if parallel.sequence_parallel:
        raise ConfigError(
            f"sampling.cache_threshold = {threshold} does not work with parallel.sequence_parallel = true; use "
            "cache_threshold = 1 or sequence_parallel = false"
        )
    if parallel.zero_stage == 3:
        raise ConfigError(
            f"sampling.cache_threshold = {threshold} skips layers that parallel.zero_stage = 3 gathers on all ranks; "
            "use cache_threshold = 1 or zero_stage = 2"
        )


def _cache_has_a_part(config: Config) -> None:
    model, threshold = config.model, config.sampling.cache_threshold
    if threshold < 1 and model.name == "dit" and model.num_layers <= deciding_blocks(model):
        raise ConfigError(
            f"sampling.cache_threshold = {threshold} reuses blocks after the first, but model.num_layers = "
            f"{model.num_layers}; use cache_threshold = 1"
        )
    if threshold < 1 and model.name == "unet" and cached_level(model) == 0:
        raise ConfigError(
            f"sampling.cache_threshold = {threshold} reuses a level of a UNet below the first, but "
            f"model.block_out_channels = {list(model.block_out_channels)} has one; use cache_threshold = 1"
        )


def _steps_can_be_dynamic(config: Config) -> None:
    """Strides are decided between calls of deterministic solvers, on the even grid, and batches shrink."""
    sampling, parallel = config.sampling, config.parallel
    if sampling.dynamic_steps == "none":
        return
    rule = f"sampling.dynamic_steps = {sampling.dynamic_steps}"
    if sampling.solver not in DYNAMIC_SOLVERS or sampling.eta != 0:
        raise ConfigError(
            f"{rule} does not work with sampling.solver = {sampling.solver} and eta = {sampling.eta}; use solver = "
            f"{' or '.join(DYNAMIC_SOLVERS)} with eta = 0"
        )
    for name, value, needed in (
        ("timestep_spacing", sampling.timestep_spacing, "trailing"),
        ("flow_shift", sampling.flow_shift, 1.0),
        ("cache_threshold", sampling.cache_threshold, 1.0),
    ):
        if value != needed:
            raise ConfigError(f"{rule} does not work with sampling.{name} = {value}; use {name} = {needed}")
    if parallel.zero_stage == 3:
        raise ConfigError(
            f"{rule} calls the network as often as the pictures of a rank need, but parallel.zero_stage = 3 gathers it "
            "on all ranks; use dynamic_steps = none or zero_stage = 2"
        )


def _text_guard_sees_pictures(config: Config) -> None:
    guard, channels = config.sampling.text_guard, config.model.in_channels
    if guard != "none" and channels not in (1, 3):
        raise ConfigError(
            f"sampling.text_guard = {guard} looks at pictures, but model.in_channels = {channels} are latents; use "
            "text_guard = none"
        )


def _no_idle_sampling_settings(config: Config) -> None:
    sampling = config.sampling
    plain = "sampling.guidance = 1; remove it, or use for example guidance = 2"
    even = "sampling.dynamic_steps = none; use dynamic_steps = spectrum"
    spacing = sampling.timestep_spacing
    by_noise = spacing in ("karras", "exponential")
    refuse_idle(
        config,
        (
            Idle("sampling", "eta", sampling.solver != "ddim", f"sampling.solver = {sampling.solver}; use ddim"),
            Idle("sampling", "flow_shift", by_noise, f"sampling.timestep_spacing = {spacing}; use trailing"),
            Idle("sampling", "text_guard", sampling.dynamic_steps == "none", even),
            Idle("sampling", "guidance_interval", sampling.guidance == 1, plain),
            Idle("sampling", "guidance_rescale", sampling.guidance == 1, plain),
        ),
    )


SAMPLING_CHECKS: tuple[Check, ...] = (
    _guidance_needs_condition_dropout,
    _guidance_acts_somewhere,
    _sampling_steps_exist,
    _cache_sees_whole_features,
    _cache_has_a_part,
    _steps_can_be_dynamic,
    _text_guard_sees_pictures,
    _no_idle_sampling_settings,
)
