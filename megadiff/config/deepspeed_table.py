"""What a DeepSpeed JSON may hold: each key is passed on, one of ours, fixed, or refused with a reason.

DeepSpeed ignores unknown top-level keys silently, so this table is the check. A test compares it with the
keys and fields that the installed DeepSpeed reads.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Passed:
    """A key that is handed to DeepSpeed as it is. `stages` are the ZeRO stages at which it has an effect."""

    kind: Literal["bool", "int", "float", "text", "list"]
    choices: tuple[str, ...] = ()
    stages: tuple[int, ...] = (0, 1, 2, 3)
    minimum: int = 0


@dataclass(frozen=True)
class Owned:
    """A key that says the same as one of our settings, which takes its value over."""

    setting: str


@dataclass(frozen=True)
class Fixed:
    """A key that this project sets itself; only that value is accepted."""

    value: bool
    reason: str


@dataclass(frozen=True)
class Refused:
    """A key that DeepSpeed knows and this project does not honour, with the thing to do instead."""

    remedy: str


Entry: TypeAlias = "Passed | Owned | Fixed | Refused | dict[str, Entry]"

_SHARDED = (1, 2, 3)
_STAGE_1_2 = (1, 2)
_STAGE_3 = (3,)
_OUR_CHECKPOINTS = Refused("checkpoints are written by megadiff; use the checkpoint section")
_NO_NVME = Refused("offload to NVMe is not supported; use device cpu")
_LOSSY = Refused("quantized communication changes the numbers and is not supported")
_MONITOR = Refused("use monitor.tensorboard and log.jsonl in the run folder")
_AVERAGING = Refused("the engine divides by the global element count itself; remove it")
_REMOVED = Refused("DeepSpeed has removed it")
_SECOND_COPY = Refused("the float32 master weights are what EMA and checkpoints hold; remove it")

_OFFLOAD_PARAM: dict[str, Entry] = {
    "device": Passed("text", ("none", "cpu"), _STAGE_3),
    "pin_memory": Passed("bool", stages=_STAGE_3),
    "nvme_path": _NO_NVME,
    "buffer_count": _NO_NVME,
    "buffer_size": _NO_NVME,
    "max_in_cpu": _NO_NVME,
}

_OFFLOAD_OPTIMIZER: dict[str, Entry] = {
    "device": Passed("text", ("none", "cpu"), _SHARDED),
    "pin_memory": Passed("bool", stages=_SHARDED),
    "ratio": Refused("partial offload is not supported; remove it"),
    "super_offload": Refused("it needs DeepSpeed's own CPU Adam; remove it"),
    "cpuadam_cores_perc": Refused("it needs DeepSpeed's own CPU Adam; remove it"),
    "nvme_path": _NO_NVME,
    "buffer_count": _NO_NVME,
    "pipeline_read": _NO_NVME,
    "pipeline_write": _NO_NVME,
    "fast_init": _NO_NVME,
}

_ZERO: dict[str, Entry] = {
    "stage": Owned("parallel.zero_stage"),
    "contiguous_gradients": Passed("bool", stages=_SHARDED),
    "reduce_scatter": Passed("bool", stages=_SHARDED),
    "reduce_bucket_size": Passed("int", stages=_SHARDED, minimum=1),
    "use_multi_rank_bucket_allreduce": Passed("bool", stages=_STAGE_1_2),
    "allgather_partitions": Passed("bool", stages=_STAGE_1_2),
    "allgather_bucket_size": Passed("int", stages=_STAGE_1_2, minimum=1),
    "overlap_comm": Passed("bool", stages=_SHARDED),
    "round_robin_gradients": Passed("bool", stages=_STAGE_1_2),
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "sub_group_size": Passed("int", stages=_STAGE_3, minimum=1),
    "stage3_prefetch_bucket_size": Passed("int", stages=_STAGE_3),
    "stage3_param_persistence_threshold": Passed("int", stages=_STAGE_3),
    "stage3_model_persistence_threshold": Passed("int", stages=_STAGE_3),
    "stage3_max_live_parameters": Passed("int", stages=_STAGE_3),
    "stage3_max_reuse_distance": Passed("int", stages=_STAGE_3),
    "stage3_module_granularity_threshold": Passed("int", stages=_STAGE_3),
    "stage3_use_all_reduce_for_fetch_params": Passed("bool", stages=_STAGE_3),
    "stage3_allgather_sequential": Passed("bool", stages=_STAGE_3),
    "memory_efficient_linear": Passed("bool", stages=_STAGE_3),
    "log_trace_cache_warnings": Passed("bool", stages=_STAGE_3),
    "enable_sanity_checks": Passed("bool", stages=_SHARDED),
    "prefetch_bucket_size": Refused("write stage3_prefetch_bucket_size"),
    "param_persistence_threshold": Refused("write stage3_param_persistence_threshold"),
    "model_persistence_threshold": Refused("write stage3_model_persistence_threshold"),
    "max_live_parameters": Refused("write stage3_max_live_parameters"),
    "max_reuse_distance": Refused("write stage3_max_reuse_distance"),
    "module_granularity_threshold": Refused("write stage3_module_granularity_threshold"),
    "use_all_reduce_for_fetch_params": Refused("write stage3_use_all_reduce_for_fetch_params"),
    "allgather_sequential": Refused("write stage3_allgather_sequential"),
    "cpu_offload": Refused("deprecated; write offload_optimizer.device"),
    "cpu_offload_param": Refused("deprecated; write offload_param.device"),
    "cpu_offload_use_pin_memory": Refused("deprecated; write offload_optimizer.pin_memory"),
    "gather_16bit_weights_on_model_save": _OUR_CHECKPOINTS,
    "stage3_gather_16bit_weights_on_model_save": _OUR_CHECKPOINTS,
    "stage3_gather_fp16_weights_on_model_save": _OUR_CHECKPOINTS,
    "load_from_fp32_weights": _OUR_CHECKPOINTS,
    "elastic_checkpoint": _OUR_CHECKPOINTS,
    "pipeline_loading_checkpoint": _OUR_CHECKPOINTS,
    "compute_grad_norm": Refused("the gradient norm is always computed and logged; remove it"),
    "parameter_alignment": Refused("it moves the shards that checkpoints and EMA address; remove it"),
    "zero_hpz_partition_size": Refused("secondary partitions are not supported; remove it"),
    "zero_quantized_weights": _LOSSY,
    "zero_quantized_nontrainable_weights": _LOSSY,
    "zero_quantized_gradients": _LOSSY,
    "ignore_unused_parameters": Refused("every parameter of the chain is used; remove it"),
    "legacy_stage1": Refused("the old stage 1 is not supported; remove it"),
    "override_module_apply": Refused("weights are set by name, not by Module.apply; remove it"),
    "zenflow": Refused("ZenFlow updates late and changes the numbers; remove it"),
    "save_muon_momentum_buffer_in_memory": Refused("Muon is not an optimizer of this project; remove it"),
    "leaf_module": Refused("the chain has no leaf modules; remove it"),
}

_BF16: dict[str, Entry] = {
    "enabled": Owned("train.precision"),
    "immediate_grad_update": Passed("bool"),
    "check_grad_overflow": Passed("bool"),
    "bf16_master_weights_and_grads": _SECOND_COPY,
    "bf16_optimizer_states": _SECOND_COPY,
}

_FP16: dict[str, Entry] = {
    "enabled": Owned("train.precision"),
    "loss_scale": Passed("float"),
    "initial_scale_power": Passed("int"),
    "loss_scale_window": Passed("int", minimum=1),
    "hysteresis": Passed("int", minimum=1),
    "consecutive_hysteresis": Passed("bool"),
    "min_loss_scale": Passed("int", minimum=1),
    "auto_cast": Refused("inputs are cast by the engine; remove it"),
    "fp16_master_weights_and_grads": _SECOND_COPY,
}

_COMMS_LOGGER: dict[str, Entry] = {
    "enabled": Passed("bool"),
    "verbose": Passed("bool"),
    "debug": Passed("bool"),
    "prof_all": Passed("bool"),
    "prof_ops": Passed("list"),
}

_DATA_TYPES: dict[str, Entry] = {
    "grad_accum_dtype": Passed("text", ("fp32", "bf16", "fp16")),
    "param_dtype": Refused("use train.precision"),
    "buffer_dtype": Refused("use train.precision"),
    "keep_in_fp32_modules": Refused("norms and position tables keep their type by themselves; remove it"),
}

DEEPSPEED_KEYS: dict[str, Entry] = {
    "train_batch_size": Owned("train.global_batch_size"),
    "train_micro_batch_size_per_gpu": Owned("train.micro_batch_size"),
    "gradient_accumulation_steps": Owned("train.gradient_accumulation_steps"),
    "gradient_clipping": Owned("optimizer.clip_norm"),
    "zero_optimization": _ZERO,
    "bf16": _BF16,
    "fp16": _FP16,
    "comms_logger": _COMMS_LOGGER,
    "data_types": _DATA_TYPES,
    "communication_data_type": Passed("text", ("fp32", "bf16", "fp16")),
    "steps_per_print": Passed("int", minimum=1),
    "wall_clock_breakdown": Passed("bool"),
    "memory_breakdown": Passed("bool"),
    "dump_state": Passed("bool"),
    "disable_python_gc": Passed("bool"),
    "log_level": Passed("text", ("debug", "info", "warning", "error", "critical")),
    "zero_allow_untested_optimizer": Fixed(True, "the optimizer is passed in by megadiff"),
    "zero_force_ds_cpu_optimizer": Fixed(False, "the optimizer is passed in by megadiff"),
    "optimizer": Refused("use optimizer.name, optimizer.lr, optimizer.betas, ..."),
    "scheduler": Refused("use optimizer.lr_schedule, optimizer.warmup_steps and train.steps"),
    "activation_checkpointing": Refused("use train.activation_checkpointing"),
    "pipeline": Refused("use parallel.pipeline_model_parallel_size and parallel.partition"),
    "tensor_parallel": Refused("use parallel.tensor_model_parallel_size"),
    "sequence_parallel_size": Refused("use parallel.sequence_parallel"),
    "seq_parallel_communication_data_type": Refused("use communication_data_type"),
    "expert_parallel": Refused("the networks have no experts; remove it"),
    "use_data_before_expert_parallelism": Refused("the networks have no experts; remove it"),
    "torch_autocast": Refused("use train.precision"),
    "bfloat16": Refused("write bf16"),
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "flops_profiler": Refused("throughput and MFU are logged by megadiff; use monitor.log_every_steps"),
    "timers": Refused("throughput is logged by megadiff; use monitor.log_every_steps"),
    "compile": Refused("use train.compile"),
    "checkpoint": _OUR_CHECKPOINTS,
    "datastates": _OUR_CHECKPOINTS,
    "datastates_ckpt": _OUR_CHECKPOINTS,
    "aio": _NO_NVME,
    "prescale_gradients": _AVERAGING,
    "gradient_predivide_factor": _AVERAGING,
    "gradient_allreduce_op": _AVERAGING,
    "managed_gradient_accumulation": _AVERAGING,
    "disable_allgather": Refused("it has no effect in DeepSpeed; remove it"),
    "dataloader_drop_last": Refused("the data order is a function of the seed and drops nothing; remove it"),
    "data_efficiency": Refused("the data order is a function of the seed; remove it"),
    "autotuning": Refused("use resolve_layout and --dry-run to compare layouts; remove it"),
    "hybrid_engine": Refused("it is for language models; remove it"),
    "weight_quantization": Refused("it is for inference; remove it"),
    "vocabulary_size": Refused("the networks have no vocabulary; remove it"),
    "nebula": _REMOVED,
    "compression_training": _REMOVED,
    "amp": Refused("use train.precision"),
    "quantize_training": _REMOVED,
    "sparse_gradients": _REMOVED,
    "eigenvalue": _REMOVED,
    "sparse_attention": _REMOVED,
    "elasticity": _REMOVED,
    "graph_harvesting": _REMOVED,
    "curriculum_learning": _REMOVED,
    "progressive_layer_drop": _REMOVED,
}
