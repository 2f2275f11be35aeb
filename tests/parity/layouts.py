"""The layouts of the parity matrix."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """A number of processes and the settings of `parity_config` that lay a run out on them."""

    name: str
    world_size: int
    settings: dict[str, Any] = field(default_factory=dict)


LAYOUTS = (
    Layout("1 process", 1),
    Layout("dp2", 2),
    Layout("tp2", 2, {"tensor": 2}),
    Layout("tp2+sp", 2, {"tensor": 2, "sequence_parallel": True}),
    Layout("pp2", 2, {"pipeline": 2}),
    Layout("zero1", 2, {"zero_stage": 1}),
    Layout("zero2", 2, {"zero_stage": 2}),
    Layout("zero3", 2, {"zero_stage": 3}),
    Layout("full checkpointing", 1, {"recompute": "full"}),
    Layout("tp2+sp, full checkpointing", 2, {"tensor": 2, "sequence_parallel": True, "recompute": "full"}),
    Layout("pp2, selective checkpointing", 2, {"pipeline": 2, "recompute": "selective"}),
    Layout("zero3, selective checkpointing", 2, {"zero_stage": 3, "recompute": "selective"}),
    Layout("tp2 x pp2", 4, {"tensor": 2, "pipeline": 2}),
    Layout("tp2+sp x pp2", 4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    Layout("dp2 x tp2", 4, {"tensor": 2}),
    Layout("dp2 x pp2", 4, {"pipeline": 2}),
    Layout("zero1 x pp2", 4, {"pipeline": 2, "zero_stage": 1}),
    Layout("zero3 x tp2", 4, {"tensor": 2, "zero_stage": 3}),
)
# In float64 (ZeRO 0 only, whose optimizer DeepSpeed leaves in the dtype of the weights).
EXACT_LAYOUTS = tuple(layout for layout in LAYOUTS if layout.settings.get("zero_stage", 0) == 0)


def product() -> Iterator[Layout]:
    """Every combination of degrees, sequence parallelism, ZeRO stage and checkpointing on four processes."""
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)):
        for sequence in (False, True) if tensor > 1 else (False,):
            for zero_stage in (0, 1) if pipeline > 1 else (0, 1, 2, 3):
                for recompute in ("none", "selective"):
                    settings = {
                        "tensor": tensor,
                        "pipeline": pipeline,
                        "sequence_parallel": sequence,
                        "zero_stage": zero_stage,
                        "recompute": recompute,
                    }
                    data = 4 // (tensor * pipeline)
                    degrees = f"dp{data} x tp{tensor}{'+sp' * sequence} x pp{pipeline}"
                    yield Layout(f"{degrees}, zero{zero_stage}, {recompute}", 4, settings)
