"""How many ranks each kind of parallelism takes and how a global batch is cut.

Pure arithmetic without a process group, and the one place for the rule
global batch = micro-batch x accumulation x data-parallel ranks.
"""

from dataclasses import dataclass

from megadiff.config.networks import is_folded
from megadiff.config.schema import Config
from megadiff.config.validate_parallel import check_parallel
from megadiff.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """The degrees of a run and the batch triple on them.

    Attributes:
        world_size: number of processes = tensor x pipeline x data.
        tensor: tensor-parallel degree.
        pipeline: number of pipeline stages.
        data: data-parallel degree.
        micro_batch_size: samples of one data rank in one forward pass.
        accumulation: micro-batches of one data rank in one optimizer step.
        zero_stage: 0 to 3.
        folded: each pipeline rank runs a stage of the first half and its mirror image in the second half.
    """

    world_size: int
    tensor: int
    pipeline: int
    data: int
    micro_batch_size: int
    accumulation: int
    zero_stage: int
    folded: bool = False

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all data ranks."""
        return self.micro_batch_size * self.accumulation * self.data


def resolve_layout(config: Config, world_size: int) -> Layout:
    """Fit a config to a number of processes.

    Args:
        config: a run; unset parts of the batch triple are derived.
        world_size: the number of processes, as the launcher gives it.

    Raises:
        ConfigError: the degrees do not divide the world, the batch triple does not multiply up, or a folded pipeline
            gets too few micro-batches.
    """
    check_parallel(config)
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
    data = _data_degree(world_size, tensor, pipeline)
    micro_batch_size, accumulation = _batch_triple(config, data, pipeline)
    zero_stage = config.parallel.zero_stage or 0
    return Layout(world_size, tensor, pipeline, data, micro_batch_size, accumulation, zero_stage, is_folded(config))


def _data_degree(world_size: int, tensor: int, pipeline: int) -> int:
    ranks = tensor * pipeline
    if world_size < 1 or world_size % ranks:
        above = -(-world_size // ranks) * ranks or ranks
        below = world_size // ranks * ranks
        remedy = f"{below} or {above}" if below > 0 else f"{above}"
        raise ConfigError(
            f"world size {world_size} is not a multiple of tensor_model_parallel_size {tensor} x "
            f"pipeline_model_parallel_size {pipeline} = {ranks}; start {remedy} processes or change the "
            "degrees"
        )
    return world_size // ranks


def _batch_triple(config: Config, data: int, pipeline: int) -> tuple[int, int]:
    """Return (micro-batch, accumulation) with micro-batch x accumulation x data = global batch."""
    train = config.train
    total, micro, accumulation = (
        train.global_batch_size,
        train.micro_batch_size,
        train.gradient_accumulation_steps,
    )
    per_rank, rest = divmod(total, data)
    if rest:
        raise _batch_error(config, data, f"{total} is not a multiple of {data} data-parallel ranks")
    # DualPipeV refuses fewer micro-batches than it has stages, two a rank.
    needed = 2 * pipeline if is_folded(config) else pipeline
    if micro is None and accumulation is None:
        accumulation = _default_accumulation(per_rank, needed)
    if accumulation is None:
        accumulation, rest = divmod(per_rank, micro or 1)
    elif micro is None:
        micro, rest = divmod(per_rank, accumulation)
    if rest or not micro or not accumulation:
        odd = f"micro_batch_size {train.micro_batch_size}"
        if train.micro_batch_size is None:
            odd = f"gradient_accumulation_steps {train.gradient_accumulation_steps}"
        raise _batch_error(config, data, f"{odd} does not divide the {per_rank} samples of a data-parallel rank")
    if micro * accumulation != per_rank:
        raise _batch_error(config, data, f"{micro} x {accumulation} x {data} = {micro * accumulation * data}")
    if is_folded(config) and accumulation < needed:
        raise ConfigError(
            f"train.gradient_accumulation_steps = {accumulation} is below the {needed} micro-batches that "
            f"pipeline_schedule = folded needs with pipeline_model_parallel_size = {pipeline}; use "
            f"gradient_accumulation_steps = {needed} with train.global_batch_size = {micro * needed * data}, or "
            "pipeline_schedule = 1f1b"
        )
    return micro, accumulation


def _default_accumulation(per_rank: int, needed: int) -> int:
    """Return the smallest divisor that gives the pipeline the micro-batches that it needs (1 without a pipeline)."""
    return next(d for d in range(min(needed, per_rank), per_rank + 1) if per_rank % d == 0)


def _batch_error(config: Config, data: int, reason: str) -> ConfigError:
    train = config.train
    micro = "derived" if train.micro_batch_size is None else train.micro_batch_size
    accumulation = "derived" if train.gradient_accumulation_steps is None else train.gradient_accumulation_steps
    unit = (train.micro_batch_size or 1) * (train.gradient_accumulation_steps or 1) * data
    near = max(unit, round(train.global_batch_size / unit) * unit)
    if train.micro_batch_size is not None and train.gradient_accumulation_steps is not None:
        near = unit
    return ConfigError(
        f"train.global_batch_size {train.global_batch_size} = micro_batch_size {micro} x "
        "gradient_accumulation_steps "
        f"{accumulation} x data-parallel ranks {data} does not hold: {reason}; with the other factors as "
        "they are, use "
        f"train.global_batch_size = {near}"
    )
