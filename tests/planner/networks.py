"""The network on which closed forms and measurements are compared, in a layout of two ranks."""

from typing import Any, Literal

from megadiff.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)

SMALL_BUCKETS = {"reduce_bucket_size": 256}
# Without a threshold of 0 ZeRO 3 would keep every parameter of this network gathered.
SHARD_ALL = {**SMALL_BUCKETS, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 256}


def small_config(
    num_layers: int = 3,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: bool = False,
    zero: int = 0,
    precision: str = "fp32",
    partition: tuple[int, ...] = (),
    zero_limits: dict[str, Any] | None = None,
    model: ModelConfig | None = None,
    schedule: Literal["auto", "1f1b", "folded"] = "auto",
    checkpointing: Literal["none", "full", "selective"] = "none",
) -> Config:
    """A small network, by default a DiT, with two micro-batches a step, or as many as a folded pipeline needs."""
    buckets = {0: {}, 1: SMALL_BUCKETS, 2: SMALL_BUCKETS, 3: SHARD_ALL}[zero] | (zero_limits or {})
    return Config(
        model=model or ModelConfig(hidden_size=32, num_heads=4, num_layers=num_layers, input_size=8, qk_norm=True),
        data=DataConfig(name="ids", num_samples=64),
        train=TrainConfig(
            global_batch_size=8,
            gradient_accumulation_steps=2 * pipeline,
            steps=20,
            precision=precision,
            activation_checkpointing=checkpointing,
            activation_checkpoint_every_blocks=1,
        ),
        optimizer=OptimizerConfig(warmup_steps=2),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            sequence_parallel=sequence,
            zero_stage=zero,
            partition=partition,
            pipeline_schedule=schedule,
        ),
        deepspeed={"zero_optimization": buckets} if buckets else {},
    )
