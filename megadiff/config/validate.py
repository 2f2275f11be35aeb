"""Rules between settings. Each check is one function in a table and raises one sentence with values and "
"remedy."""

from collections.abc import Callable

from megadiff.config.schema import Config
from megadiff.errors import ConfigError

Check = Callable[[Config], None]

# Layers of a chain besides the blocks: embed and head.
_OUTER_LAYERS = 2
_EMOJI_PIXELS = 72
# Channels that each source of pictures can be loaded with; sources that are not listed have any number.
_PICTURE_CHANNELS = {"emoji": (3,), "fashion_mnist": (1, 3), "image_folder": (1, 3)}
_NEEDS_PATH = ("fashion_mnist", "image_folder", "latents")


def _divisors(number: int, limit: int | None = None) -> str:
    """List the divisors of a number up to a limit as "1, 2, 4 or 8"."""
    found = [str(d) for d in range(1, min(number, limit or number) + 1) if number % d == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def _patch_divides_input(config: Config) -> None:
    size, patch = config.model.input_size, config.model.patch_size
    if size % patch:
        raise ConfigError(
            f"model.patch_size = {patch} does not divide model.input_size = {size}; use {_divisors(size)}"
        )


def _heads_divide_hidden(config: Config) -> None:
    hidden, heads = config.model.hidden_size, config.model.num_heads
    if hidden % heads:
        raise ConfigError(
            f"model.num_heads = {heads} does not divide model.hidden_size = {hidden}; use {_divisors(hidden, 64)}"
        )


def _hidden_fits_positions(config: Config) -> None:
    hidden = config.model.hidden_size
    if hidden % 4:
        near = hidden + 4 - hidden % 4
        raise ConfigError(
            f"model.hidden_size = {hidden} is not a multiple of 4, which the 2D sine-cosine positions need "
            "(sine and "
            f"cosine of row and column); use {near}"
        )


def _mlp_width_is_whole(config: Config) -> None:
    width = config.model.hidden_size * config.model.mlp_ratio
    if width != int(width) or width < 1:
        raise ConfigError(
            f"model.mlp_ratio = {config.model.mlp_ratio} x model.hidden_size = {config.model.hidden_size} "
            "gives "
            f"{width} hidden features, which is not a whole number; use mlp_ratio = 4.0"
        )


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


def _flip_has_meaning(config: Config) -> None:
    if config.data.flip and config.data.name in ("latents", "ids"):
        raise ConfigError(
            f"data.flip = true has no meaning for data.name = {config.data.name}; set data.flip = false "
            "(latents of "
            "flipped pictures are stored, not computed)"
        )


def _warmup_ends_before_run(config: Config) -> None:
    warmup, steps = config.optimizer.warmup_steps, config.train.steps
    if warmup >= steps:
        raise ConfigError(
            f"optimizer.warmup_steps = {warmup} is not below train.steps = {steps}; use at most {steps - 1}"
        )


def _stop_within_horizon(config: Config) -> None:
    stop, steps = config.train.stop_at_step, config.train.steps
    if stop is not None and stop > steps:
        raise ConfigError(f"train.stop_at_step = {stop} is after train.steps = {steps}; use at most {steps}")


def _float64_needs_zero_0(config: Config) -> None:
    stage = config.parallel.zero_stage or 0
    if config.train.precision == "fp64" and stage:
        raise ConfigError(
            f"train.precision = fp64 does not work with parallel.zero_stage = {stage}, whose master weights "
            "are "
            "float32; use zero_stage = 0 or precision = fp32"
        )


def _half_needs_masters(config: Config) -> None:
    if config.train.precision in ("bf16", "fp16") and config.parallel.zero_stage == 0:
        raise ConfigError(
            f"train.precision = {config.train.precision} keeps its float32 master weights in the sharded optimizer, "
            "but parallel.zero_stage = 0; use zero_stage = 1 (the same on one rank) or more"
        )


def _flash_needs_half(config: Config) -> None:
    backend, precision = config.train.attention_backend, config.train.precision
    if backend in ("flash", "flash_attn") and precision not in ("bf16", "fp16"):
        raise ConfigError(
            f"train.attention_backend = {backend} has no {precision} kernel; use train.precision = bf16 or "
            "attention_backend = auto"
        )


def _guidance_needs_condition_dropout(config: Config) -> None:
    guidance = config.sampling.guidance
    if guidance != 1 and config.diffusion.condition_dropout == 0:
        raise ConfigError(
            f"sampling.guidance = {guidance} needs a network that was trained without its condition at "
            "times, but "
            "diffusion.condition_dropout = 0; use condition_dropout = 0.1 or guidance = 1"
        )


def _sampling_steps_exist(config: Config) -> None:
    steps, train = config.sampling.steps, config.diffusion.num_train_timesteps
    if steps > train:
        raise ConfigError(
            f"sampling.steps = {steps} is above diffusion.num_train_timesteps = {train}; use at most {train}"
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
    if config.train.norm_backend == "apex" and not config.model.qk_norm:
        raise ConfigError(
            "train.norm_backend = apex has no effect with model.qk_norm = false, because no other norm has weights; "
            "use norm_backend = torch or qk_norm = true"
        )


def _no_idle_settings(config: Config) -> None:
    """Refuse a value other than the default where another setting makes that it is never read."""
    default, sgd = Config(), config.optimizer.name == "sgd"
    emoji, ids = config.data.name == "emoji", config.data.name == "ids"
    idle = (
        (
            "optimizer",
            "momentum",
            not sgd,
            f"optimizer.name = {config.optimizer.name}; use betas, or optimizer.name = sgd",
        ),
        ("optimizer", "betas", sgd, "optimizer.name = sgd; use momentum, or optimizer.name = adamw"),
        ("optimizer", "eps", sgd, "optimizer.name = sgd; remove it, or use optimizer.name = adamw"),
        (
            "diffusion",
            "min_snr_gamma",
            config.diffusion.loss_weight == "uniform",
            "loss_weight = uniform; use min_snr",
        ),
        (
            "data",
            "num_samples",
            not ids,
            f"data.name = {config.data.name}; remove it, or use data.name = ids",
        ),
        (
            "data",
            "grouping",
            not emoji,
            f"data.name = {config.data.name}; remove it, or use data.name = emoji",
        ),
        (
            "data",
            "grouping",
            emoji and bool(config.data.classes),
            "data.classes, which names its groups itself; remove one of them",
        ),
    )
    for section, name, is_idle, remedy in idle:
        value = getattr(getattr(config, section), name)
        if is_idle and value != getattr(getattr(default, section), name):
            raise ConfigError(f"{section}.{name} = {value} has no effect with {remedy}")


def _heads_split_over_tensor(config: Config) -> None:
    tensor, heads = config.parallel.tensor_model_parallel_size, config.model.num_heads
    if heads % tensor:
        raise ConfigError(
            f"tensor_model_parallel_size = {tensor} does not divide model.num_heads = {heads}; use {_divisors(heads)}"
        )


def _mlp_splits_over_tensor(config: Config) -> None:
    tensor, width = (
        config.parallel.tensor_model_parallel_size,
        round(config.model.hidden_size * config.model.mlp_ratio),
    )
    if width % tensor:
        raise ConfigError(
            f"tensor_model_parallel_size = {tensor} does not divide the {width} hidden features of the MLP "
            f"(hidden_size {config.model.hidden_size} x mlp_ratio {config.model.mlp_ratio}); change one of "
            "them"
        )


def _sequence_parallel_needs_tensor(config: Config) -> None:
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        raise ConfigError(
            "sequence_parallel = true splits tokens over the tensor-parallel ranks, but "
            "tensor_model_parallel_size = 1; "
            "use 2 or more, or sequence_parallel = false"
        )


def _tokens_split_over_tensor(config: Config) -> None:
    tensor = config.parallel.tensor_model_parallel_size
    tokens = (config.model.input_size // config.model.patch_size) ** 2
    if config.parallel.sequence_parallel and tokens % tensor:
        raise ConfigError(
            f"sequence_parallel = true with tensor_model_parallel_size = {tensor} does not divide {tokens} "
            "tokens "
            f"(input_size {config.model.input_size} / patch_size {config.model.patch_size}, squared); use "
            f"{_divisors(tokens, 64)} ranks"
        )


def _stages_have_layers(config: Config) -> None:
    stages, layers = config.parallel.pipeline_model_parallel_size, config.model.num_layers + _OUTER_LAYERS
    if stages > layers:
        raise ConfigError(
            f"pipeline_model_parallel_size = {stages} is above the {layers} layers of the chain (embed, "
            f"{config.model.num_layers} blocks, head); use at most {layers}"
        )


def _partition_covers_chain(config: Config) -> None:
    partition, stages = config.parallel.partition, config.parallel.pipeline_model_parallel_size
    layers = config.model.num_layers + _OUTER_LAYERS
    if not partition:
        return
    shown = f"parallel.partition = {list(partition)}"
    if len(partition) != stages:
        raise ConfigError(
            f"{shown} has {len(partition)} entries for pipeline_model_parallel_size = {stages}; give one per stage"
        )
    if min(partition) < 1:
        raise ConfigError(f"{shown} gives a stage no layer; use 1 or more per stage")
    if sum(partition) != layers:
        raise ConfigError(
            f"{shown} sums to {sum(partition)}, but the chain has {layers} layers (embed, "
            f"{config.model.num_layers} "
            f"blocks, head); make the sum {layers}"
        )


def _pipeline_zero_stage(config: Config) -> None:
    stages, zero = config.parallel.pipeline_model_parallel_size, config.parallel.zero_stage or 0
    if stages > 1 and zero > 1:
        raise ConfigError(
            f"parallel.zero_stage = {zero} does not work with pipeline_model_parallel_size = {stages}, "
            "because gradients "
            "of all micro-batches stay on the stage until the step; use zero_stage 0 or 1, or 1 stage"
        )


PARALLEL_CHECKS: tuple[Check, ...] = (
    _heads_split_over_tensor,
    _mlp_splits_over_tensor,
    _sequence_parallel_needs_tensor,
    _tokens_split_over_tensor,
    _stages_have_layers,
    _partition_covers_chain,
    _pipeline_zero_stage,
    _float64_needs_zero_0,
    _half_needs_masters,
)

CHECKS: tuple[Check, ...] = (
    _patch_divides_input,
    _heads_divide_hidden,
    _hidden_fits_positions,
    _mlp_width_is_whole,
    _channels_fit_data,
    _data_has_path,
    _emoji_size,
    _flip_has_meaning,
    _warmup_ends_before_run,
    _stop_within_horizon,
    _flash_needs_half,
    _guidance_needs_condition_dropout,
    _sampling_steps_exist,
    _betas_below_one,
    _apex_fits,
    _norm_backend_has_a_norm,
    _no_idle_settings,
    *PARALLEL_CHECKS,
)


def check_parallel(config: Config) -> None:
    """Check what the layout asks of the network, whatever the number of processes."""
    for check in PARALLEL_CHECKS:
        check(config)


def validate(config: Config) -> None:
    """Check all rules between settings; the first one that is broken raises ConfigError."""
    for check in CHECKS:
        check(config)
