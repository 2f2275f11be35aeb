"""The tiny networks of the parity tests, their values and their data: the same on every layout.

adaLN-zero starts with zero gates and a zero head, so most gradients vanish at the start; here every parameter
starts with a random value that depends on its name only.
"""

import hashlib
import math
import re
from typing import Any

import torch
from torch import Tensor

from megadiff.config.layout import Layout
from megadiff.config.presets import preset_values
from megadiff.config.schema import (
    Config,
    EmaConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from megadiff.data.batch import Batch
from megadiff.diffusion.condition import null_labels_like
from megadiff.engine.engine import Engine
from megadiff.models.sizes import text_size

GLOBAL_BATCH = 8


def _preset(name: str, **options: Any) -> ModelConfig:
    return ModelConfig(**{**preset_values(name), **options})


DIT = ModelConfig(hidden_size=32, num_heads=4, num_layers=4, input_size=8, patch_size=2, num_classes=10, qk_norm=True)
UDIT = _preset("udit-tiny", qk_norm=True)
UNET = _preset("unet-tiny-test")
TEXT_UNET = _preset("unet-text-tiny-test")
# Every option that changes the layers of a UNet, and groups of 3 and 6 channels.
OPTIONS_UNET = _preset(
    "unet-tiny-test",
    block_out_channels=(24, 48),
    attention_head_dim=12,
    attention_tile_size=2,
    skip="gated",
    skip_shift=True,
    resnet_time_scale_shift=True,
    resample="pool",
    condition="none",
)
# beta1 = 0 makes the first moment the very gradient of the last step, clipped as the optimizer saw it. eps stands
# above the gradients' rounding noise, so that no update depends on the sign of a gradient that is zero up to rounding.
ADAMW = OptimizerConfig(
    name="adamw", lr=2e-3, betas=(0.0, 0.99), eps=1e-4, weight_decay=0.1, clip_norm=1.0, warmup_steps=2
)
# The momentum's buffer is the very gradient after the first step.
SGD = OptimizerConfig(name="sgd", lr=0.1, momentum=0.5, clip_norm=1.0, warmup_steps=2)
# beta2 = 0 makes the momentum the very gradient.
LION = OptimizerConfig(name="lion", lr=2e-4, betas=(0.9, 0.0), weight_decay=0.1, clip_norm=1.0, warmup_steps=2)
OPTIMIZERS = {
    "adamw": ADAMW,
    "adamw_ema": ADAMW.model_copy(update={"name": "adamw_ema"}),
    "sgd": SGD,
    "lion": LION,
}
GRADIENT_KEYS = {
    "adamw": "exp_avg",
    "adamw_ema": "exp_avg",
    "sgd": "momentum_buffer",
    "lion": "exp_avg",
}  # the optimizer's state that shows the gradient


def parity_config(
    tensor: int = 1,
    pipeline: int = 1,
    sequence_parallel: bool = False,
    zero_stage: int = 0,
    optimizer: str = "adamw",
    precision: str = "fp32",
    recompute: str = "none",
    compile: bool = False,
    accumulation: int = 2,
    schedule: str = "auto",
    every: int = 2,
    model: ModelConfig = DIT,
) -> Config:
    """A run of the tiny network on a layout; the data degree follows from the number of processes."""
    return Config(
        model=model,
        train=TrainConfig(
            steps=20,
            global_batch_size=GLOBAL_BATCH,
            gradient_accumulation_steps=accumulation,
            precision=precision,
            activation_checkpointing=recompute,
            activation_checkpoint_every_blocks=every,
            compile=compile,
        ),
        optimizer=OPTIMIZERS[optimizer],
        ema=EmaConfig(decay=0.9),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            pipeline_schedule=schedule,
            sequence_parallel=sequence_parallel,
            zero_stage=zero_stage,
        ),
    )


def seeded(*parts: object) -> torch.Generator:
    """A CPU generator that is a function of the parts."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def random_value(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A value for a parameter that leaves no gradient zero: about unit gain for matrices, 0.2 for vectors."""
    value = torch.randn(shape, generator=seeded("value", name), dtype=torch.float64)
    if re.search(r"norm\d?\.weight$", name):
        return (1.0 + 0.2 * value).to(dtype)
    fan_in = shape[1:].numel()
    return (value * (1 / math.sqrt(fan_in) if len(shape) > 1 else 0.2)).to(dtype)


def give_values(engine: Engine) -> None:
    """Sets every parameter and its moving average to `random_value`, through the shards."""
    shards = engine.shards
    for shard in shards.all:
        full = random_value(shard.name, shard.full_shape, shard.master.dtype)
        box = full[tuple(slice(o, o + s) for o, s in zip(shard.offset, shard.size, strict=True))]
        shard.master.copy_(box.reshape(-1)[shard.start : shard.stop])
        engine.ema.values[shard.name].copy_(shard.master)
    shards.publish({shard.name: shard.master for shard in shards.all})


def global_batch(model: ModelConfig, step: int) -> Batch:
    """The samples of one step over all ranks: random pictures and labels."""
    generator = seeded("batch", step)
    shape = (GLOBAL_BATCH, model.in_channels, model.input_size, model.input_size)
    return Batch(
        images=torch.rand(shape, generator=generator) * 2 - 1,
        labels=random_conditions(model, GLOBAL_BATCH, generator),
        sample_ids=torch.arange(GLOBAL_BATCH) + step * GLOBAL_BATCH,
    )


def random_conditions(model: ModelConfig, count: int, generator: torch.Generator) -> Tensor:
    """Classes, or texts where the network reads texts."""
    if size := text_size(model):
        return torch.randn(count, size, generator=generator)
    return torch.randint(model.num_classes, (count,), generator=generator)


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` of a batch."""
    mask = None if batch.mask is None else batch.mask[start:stop]
    return Batch(batch.images[start:stop], batch.labels[start:stop], batch.sample_ids[start:stop], mask)


def micro_batches(batch: Batch, layout: Layout, data_index: int) -> list[Batch]:
    """The part of a global batch that one data rank trains on."""
    first = data_index * layout.micro_batch_size * layout.accumulation
    size = layout.micro_batch_size
    return [cut(batch, start, start + size) for start in range(first, first + size * layout.accumulation, size)]


def probe(config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs for a prediction: (x_t, t, labels) with an odd batch, one of them without a condition."""
    model = config.model
    x_t = torch.randn(3, model.in_channels, model.input_size, model.input_size, generator=seeded("probe"))
    x_t = x_t.double() if config.train.precision == "fp64" else x_t
    labels = random_conditions(model, 3, seeded("labels"))
    labels[1] = null_labels_like(labels, model.num_classes)[1]
    return x_t, torch.tensor([3, 500, 999]), labels


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """A copy of a config with some values of some sections replaced."""
    values = {name: {**getattr(config, name).model_dump(), **new} for name, new in sections.items()}
    return Config.model_validate({**config.model_dump(), **values})
