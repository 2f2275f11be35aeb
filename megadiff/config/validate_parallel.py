"""Rules between the layout and the network. Each check raises one sentence with values and remedy."""

from math import gcd

from megadiff.config.checks import Check, choices, divisors
from megadiff.config.networks import attention_levels, attention_sides, is_folded, num_chain_layers
from megadiff.config.schema import Config
from megadiff.errors import ConfigError

_SHOWN_RANKS = 64


def _heads_split_over_tensor(config: Config) -> None:
    tensor, heads = config.parallel.tensor_model_parallel_size, config.model.num_heads
    if heads % tensor:
        raise ConfigError(
            f"tensor_model_parallel_size = {tensor} does not divide model.num_heads = {heads}; use {divisors(heads)}"
        )


def _mlp_splits_over_tensor(config: Config) -> None:
    tensor, width = (
        config.parallel.tensor_model_parallel_size,
        round(config.model.hidden_size * config.model.mlp_ratio),
    )
    if width % tensor:
        raise ConfigError(
            f"tensor_model_parallel_size = {tensor} does not divide the {width} hidden features of the MLP "
            f"(hidden_size {config.model.hidden_size} x mlp_ratio {config.model.mlp_ratio}); change one of them"
        )


def _groups_split_over_tensor(config: Config) -> None:
    """Whole groups a rank; channels, and GEGLU's four times as many features, are multiples of the groups."""
    tensor, groups = config.parallel.tensor_model_parallel_size, config.model.norm_num_groups
    if groups % tensor:
        raise ConfigError(
            f"tensor_model_parallel_size = {tensor} does not divide model.norm_num_groups = {groups}, of which a rank "
            f"has whole ones; use {divisors(groups, _SHOWN_RANKS)}"
        )


def _level_heads_split_over_tensor(config: Config) -> None:
    tensor, model = config.parallel.tensor_model_parallel_size, config.model
    heads = {model.block_out_channels[level] // model.attention_head_dim for level in attention_levels(model)}
    if gcd(*heads) % tensor:
        raise ConfigError(
            f"tensor_model_parallel_size = {tensor} does not divide the {choices(sorted(heads))} heads of the levels "
            f"that attend (channels / model.attention_head_dim = {model.attention_head_dim}); use "
            f"{divisors(gcd(*heads), _SHOWN_RANKS)}"
        )


def _sequence_parallel_needs_tensor(config: Config) -> None:
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        raise ConfigError(
            "sequence_parallel = true splits tokens over the tensor-parallel ranks, but tensor_model_parallel_size = "
            "1; use 2 or more, or sequence_parallel = false"
        )


def _sequence_parallel_needs_transformers(config: Config) -> None:
    if config.parallel.sequence_parallel and config.model.condition != "text":
        raise ConfigError(
            "sequence_parallel = true splits the tokens of transformer blocks, but a UNet with model.condition = "
            f"{config.model.condition} has none; use sequence_parallel = false"
        )


def _tokens_split_over_tensor(config: Config) -> None:
    tensor, sides = config.parallel.tensor_model_parallel_size, attention_sides(config.model)
    if not config.parallel.sequence_parallel:
        return
    for side in sides:
        if side**2 % tensor:
            raise ConfigError(
                f"sequence_parallel = true with tensor_model_parallel_size = {tensor} does not divide {side**2} tokens "
                f"({side} x {side}); use {divisors(gcd(*(side**2 for side in sides)), _SHOWN_RANKS)} ranks"
            )


def _stages_have_layers(config: Config) -> None:
    ranks, layers = config.parallel.pipeline_model_parallel_size, num_chain_layers(config.model)
    if is_folded(config) and 2 * ranks > layers:
        raise ConfigError(
            f"pipeline_model_parallel_size = {ranks} with pipeline_schedule = folded makes {2 * ranks} stages, more "
            f"than the {layers} layers of the network; use at most {layers // 2}, or pipeline_schedule = 1f1b"
        )
    if ranks > layers:
        raise ConfigError(
            f"pipeline_model_parallel_size = {ranks} is above the {layers} layers of the network; use at most {layers}"
        )


def _partition_covers_chain(config: Config) -> None:
    partition, ranks = config.parallel.partition, config.parallel.pipeline_model_parallel_size
    if not partition:
        return
    shown, layers = f"parallel.partition = {list(partition)}", num_chain_layers(config.model)
    stages = 2 * ranks if is_folded(config) else ranks
    if len(partition) != stages:
        schedule = f" with pipeline_schedule = folded, which has {stages} stages" if stages > ranks else ""
        raise ConfigError(
            f"{shown} has {len(partition)} entries for pipeline_model_parallel_size = {ranks}{schedule}; give one per "
            "stage"
        )
    if min(partition) < 1:
        raise ConfigError(f"{shown} gives a stage no layer; use 1 or more per stage")
    if sum(partition) != layers:
        raise ConfigError(
            f"{shown} sums to {sum(partition)}, but the network has {layers} layers; make the sum {layers}"
        )


def _schedule_needs_stages(config: Config) -> None:
    parallel = config.parallel
    if parallel.pipeline_schedule != "auto" and parallel.pipeline_model_parallel_size == 1:
        raise ConfigError(
            f"parallel.pipeline_schedule = {parallel.pipeline_schedule} has no effect with "
            "pipeline_model_parallel_size = 1; use 2 or more, or pipeline_schedule = auto"
        )


def _path_rates_have_one_optimizer(config: Config) -> None:
    ratios, stages = config.optimizer.path_lr_ratios, config.parallel.pipeline_model_parallel_size
    if stages > 1 and len(set(ratios)) > 1 and config.parallel.zero_stage == 1:
        raise ConfigError(
            f"optimizer.path_lr_ratios = {list(ratios)} does not work with parallel.zero_stage = 1 and "
            f"pipeline_model_parallel_size = {stages}: DeepSpeed reduces gradient norms group by group, but not every "
            "stage holds a part of every path; use zero_stage = 0, or 1 stage"
        )


def _pipeline_zero_stage(config: Config) -> None:
    stages, zero = config.parallel.pipeline_model_parallel_size, config.parallel.zero_stage or 0
    if stages > 1 and zero > 1:
        raise ConfigError(
            f"parallel.zero_stage = {zero} does not work with pipeline_model_parallel_size = {stages}, because "
            "gradients of all micro-batches stay on the stage until the step; use zero_stage 0 or 1, or 1 stage"
        )


def _float64_needs_zero_0(config: Config) -> None:
    stage = config.parallel.zero_stage or 0
    if config.train.precision == "fp64" and stage:
        raise ConfigError(
            f"train.precision = fp64 does not work with parallel.zero_stage = {stage}, whose master weights are "
            "float32; use zero_stage = 0 or precision = fp32"
        )


def _half_needs_masters(config: Config) -> None:
    if config.train.precision in ("bf16", "fp16") and config.parallel.zero_stage == 0:
        raise ConfigError(
            f"train.precision = {config.train.precision} keeps its float32 master weights in the sharded optimizer, "
            "but parallel.zero_stage = 0; use zero_stage = 1 (the same on one rank) or more"
        )


_ANY_NETWORK: tuple[Check, ...] = (
    _sequence_parallel_needs_tensor,
    _tokens_split_over_tensor,
    _stages_have_layers,
    _partition_covers_chain,
    _schedule_needs_stages,
    _path_rates_have_one_optimizer,
    _pipeline_zero_stage,
    _float64_needs_zero_0,
    _half_needs_masters,
)

PARALLEL_CHECKS: dict[str, tuple[Check, ...]] = {
    "dit": (_heads_split_over_tensor, _mlp_splits_over_tensor, *_ANY_NETWORK),
    "unet": (
        _groups_split_over_tensor,
        _level_heads_split_over_tensor,
        _sequence_parallel_needs_transformers,
        *_ANY_NETWORK,
    ),
}


def check_parallel(config: Config) -> None:
    """Check what the layout asks of the network, whatever the number of processes."""
    for check in PARALLEL_CHECKS[config.model.name]:
        check(config)
