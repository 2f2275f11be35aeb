"""Lets go of what DeepSpeed's hooks and module globals hold of an engine, so that its memory is free for the next."""

import inspect
from typing import Any

import deepspeed
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

_CACHED_METHOD = "_PartitionedParameterCoordinator__params_to_release"


def release(engine: deepspeed.DeepSpeedEngine) -> None:
    """Ends `engine`, which takes no step after this; Python's collector then frees its network and optimizer."""
    engine.destroy()  # hooks on nodes of autograd, where the collector does not look
    if isinstance(engine, deepspeed.PipelineEngine):
        engine.loss = None  # its graph, and that of the outputs, leads back to the engine
        engine.pipe_buffers = {}
    # ZeRO 3 never takes a network off its stack of running modules, and caches by module for as long as the process
    # lives. The cache is private and may be gone in a later DeepSpeed.
    if engine.module in FWD_MODULE_STACK:
        FWD_MODULE_STACK.remove(engine.module)
    instrumented: Any = getattr(PartitionedParameterCoordinator, _CACHED_METHOD, None)
    if instrumented is not None:
        cached: Any = inspect.getclosurevars(instrumented).nonlocals.get("func")
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
