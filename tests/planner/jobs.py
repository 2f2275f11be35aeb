"""Jobs for the pool of processes: an engine is trained for a few steps and measured."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from megadiff.config.layout import resolve_layout
from megadiff.config.schema import Config
from megadiff.data import BatchLoader, open_dataset
from megadiff.data.batch import Batch
from megadiff.dist.process import Process
from megadiff.dist.traffic import count_traffic
from megadiff.engine.build import build_engine
from megadiff.engine.engine import Engine
from megadiff.planner.traffic import SCALAR_ELEMENTS


def start_engine(config: Config) -> tuple[Engine, Iterator[list[Batch]]]:
    """The engine of this rank and its steps of data."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    process = Process(rank, world_size, rank, torch.device("cpu"))
    layout = resolve_layout(config, world_size)
    engine = build_engine(config, layout, process)
    loader = BatchLoader(
        open_dataset(config),
        config.train.seed,
        layout.global_batch_size,
        layout.micro_batch_size,
        engine.grid.data.index,
        layout.data,
        0,
    )
    return engine, iter(loader)


def counted_step(config: Config) -> tuple[int, dict, dict]:
    """The stage of this rank, and the bytes and the number of scalar operations of its third step."""
    engine, steps = start_engine(config)
    for _ in range(2):  # a pipeline sends shapes in its first step, ZeRO 3 learns the order of its layers
        engine.train_step(next(steps))
    batches = next(steps)
    with count_traffic(SCALAR_ELEMENTS) as traffic:
        engine.train_step(batches)
    return engine.grid.pipe.index, dict(traffic.payload), dict(traffic.scalars)


def measured_memory(config: Config) -> dict[str, int]:
    """Bytes of the tensors that this rank holds, by class; gradients at the end of the backward pass."""
    engine, steps = start_engine(config)
    seen: list[int] = []
    taken = engine.deepspeed.step

    def measure_and_step() -> None:
        seen.append(_gradient_bytes(engine))
        taken()

    engine.deepspeed.step = measure_and_step
    engine.train_step(next(steps))
    optimizer = engine.shards.optimizer
    state = [value for entry in optimizer.state.values() for value in entry.values() if value.dim() > 0]
    parameters = list(engine.chain.parameters())
    weights = [p.ds_tensor for p in parameters] if engine.layout.zero_stage == 3 else parameters
    return {
        "weights": _storage_bytes(weights),
        "gradients": max(seen),
        "masters": _storage_bytes(_masters(engine)),
        "optimizer": _storage_bytes(state),
        "average": _storage_bytes(list(engine.ema.values.values())),
    }


def _masters(engine: Engine) -> list[torch.Tensor]:
    """The full-precision values beside the weights; at ZeRO 0 the weights are all there is."""
    if engine.layout.zero_stage == 0:
        return []
    optimizer = engine.deepspeed.optimizer
    if engine.layout.zero_stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    if isinstance(optimizer, BF16_Optimizer):
        return list(optimizer.fp32_groups_flat_partition)
    return list(optimizer.single_partition_of_fp32_groups)


def _gradient_bytes(engine: Engine) -> int:
    """What the parameters' `grad` and DeepSpeed's sums and partitions of gradients hold."""
    optimizer = engine.deepspeed.optimizer
    kept = [p.grad for p in engine.chain.parameters() if p.grad is not None]
    kept += [p.grad_accum for p in engine.chain.parameters() if getattr(p, "grad_accum", None) is not None]
    if isinstance(optimizer, BF16_Optimizer):
        kept += list(optimizer.fp32_groups_gradients_flat)
    elif engine.layout.zero_stage:
        for group in optimizer.averaged_gradients.values():
            kept += list(group or ())
    if engine.layout.zero_stage == 3:
        kept.append(optimizer.grad_partitions_flat_buffer)
    return _storage_bytes(kept)


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors; one that several tensors share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
