"""Puts a run together: grid, stage, objective, optimizer, DeepSpeed, shards."""

from pathlib import Path

import deepspeed
import torch
from torch import nn

from megadiff.config.deepspeed_json import build_deepspeed_config
from megadiff.config.diffusion import compares_features, needs_gradients
from megadiff.config.layout import Layout
from megadiff.config.schema import Config
from megadiff.diffusion.importance import make_importance
from megadiff.diffusion.objective import DiffusionObjective
from megadiff.diffusion.perceptual import make_perceptual
from megadiff.diffusion.schedule import schedule_of
from megadiff.dist.grid import make_grid
from megadiff.dist.process import Process, quiet_stdout
from megadiff.engine.clip import average_gradients, clip_gradients, global_norm
from megadiff.engine.engine import Engine
from megadiff.engine.optimizer import make_optimizer
from megadiff.engine.output_gradient import OutputGradient
from megadiff.engine.runners import PipelineLoss, PipelineRunner, Runner, WholeRunner
from megadiff.errors import ConfigError
from megadiff.models import FUSED_OPERATORS
from megadiff.models.vae import load_decoder
from megadiff.models.vgg import load_vgg
from megadiff.ops.attention import require_flash_attn
from megadiff.ops.library import describe_kernels
from megadiff.ops.rms_norm import require_apex
from megadiff.parallel.pipeline import pipeline_module
from megadiff.parallel.shards import Shards
from megadiff.parallel.stage import DTYPES, Stage, build_stage


def build_engine(config: Config, layout: Layout, process: Process, run_config: Config | None = None) -> Engine:
    """Builds the engine of this rank; a collective call.

    Args:
        config: the settings.
        layout: of them on this number of processes.
        process: this process.
        run_config: the settings of the whole run where `config` is those of a stage of it.

    Raises:
        ConfigError, PlanError: the settings do not fit the network or this machine.
    """
    check_device(config, process)
    grid = make_grid(layout.pipeline, layout.data, layout.tensor, layout.folded)
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    stage = build_stage(config, grid, process.device, dtype)
    objective = make_objective(config, process.device)
    optimizer = make_optimizer(config.optimizer, stage.chain, config.train.kernels)
    watched = needs_gradients(config.diffusion) and "head" in stage.chain.layer_names
    gradient = OutputGradient(stage.chain) if watched else None
    loss = PipelineLoss(objective, gradient)
    model: nn.Module = stage.chain if layout.pipeline == 1 else pipeline_module(stage.modules, grid, loss)
    with quiet_stdout():
        wrapped, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=list(stage.chain.parameters()),
            config=build_deepspeed_config(config, layout),
            mpu=grid.mpu if layout.pipeline == 1 else None,
        )
    runner: Runner = WholeRunner(wrapped, objective, gradient)
    if layout.pipeline > 1:
        runner = PipelineRunner(wrapped, loss)
    shards = Shards(wrapped, stage.chain, stage.sharding, grid, layout.zero_stage)
    engine = Engine(
        config, layout, grid, stage, wrapped, objective, runner, gradient, shards, process.device, run_config
    )
    if layout.zero_stage == 0:
        _clip_before_step(engine, optimizer, stage)
        if layout.data == 1:
            _skip_reduction(wrapped)
    if config.train.precision == "fp64":
        wrapped.buffered_allreduce_fallback = lambda **_: average_gradients(stage.chain.parameters(), grid.data)
    return engine


def make_objective(config: Config, device: torch.device | None = None) -> DiffusionObjective:
    """The training objective that the config describes.

    Args:
        config: the settings.
        device: where a network of features computes; the CPU by default.
    """
    schedule = schedule_of(config)
    perceptual = None
    if compares_features(config.diffusion):
        perceptual = make_perceptual(config.diffusion, schedule, _features(config, device or torch.device("cpu")))
    return DiffusionObjective(
        schedule,
        config.diffusion,
        config.model.num_classes,
        config.train.seed,
        config.train.kernels,
        make_importance(config, schedule),
        perceptual,
    )


def _features(config: Config, device: torch.device) -> nn.Module:
    """VGG-19 on pictures, behind the decoder where the network sees latents."""
    diffusion, dtype = config.diffusion, torch.float64 if config.train.precision == "fp64" else torch.float32
    layers: list[nn.Module] = [load_vgg(Path(diffusion.vgg_path or ""))]
    if diffusion.vae_path:
        layers.insert(0, load_decoder(Path(diffusion.vae_path), config.model.in_channels))
    return nn.Sequential(*layers).to(device, dtype)


def check_device(config: Config, process: Process) -> None:
    """Refuses what this machine cannot do.

    Raises:
        ConfigError: fp16 without CUDA, flash-attn or apex that is not installed, required kernels that are not there.
    """
    if config.train.precision == "fp16" and process.device.type == "cpu":
        raise ConfigError("train.precision = fp16 does not exist on CPU; use fp32 or bf16")
    if config.train.attention_backend == "flash_attn":
        require_flash_attn()
    if config.optimizer.name == "apex_fused_adam":
        _check_apex("optimizer.name = apex_fused_adam", "apex.optimizers", process.device)
    if config.train.norm_backend == "apex":
        _check_apex("train.norm_backend = apex", "apex.normalization.fused_layer_norm", process.device)
        # apex loads it at the first call only, and is often built without it.
        _check_apex("train.norm_backend = apex", "fused_layer_norm_cuda", process.device)
    kernels_line(config, process.device)


def _check_apex(setting: str, module: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(f"{setting} runs on CUDA only, but this process computes on {device.type}; remove it")
    require_apex(setting, module)


def kernels_line(config: Config, device: torch.device) -> str:
    """How the fused operators of a run are computed on `device`, for the log.

    Raises:
        ConfigError: `train.kernels` = required where there are none.
    """
    operators = (*FUSED_OPERATORS[config.model.name], "diffuse", "weighted_mse", "solver_step")
    if config.optimizer.name == "adamw_ema":
        operators += ("adamw_ema",)
    return describe_kernels(config.train.kernels, operators, device, DTYPES[config.train.precision])


def _skip_reduction(engine: deepspeed.DeepSpeedEngine) -> None:
    """Keeps DeepSpeed from flattening, summing and copying back the gradients of a single data rank."""
    if isinstance(engine, deepspeed.PipelineEngine):
        engine.pipeline_enable_backward_allreduce = False
    else:
        engine.enable_backward_allreduce = False


def _clip_before_step(engine: Engine, optimizer: torch.optim.Optimizer, stage: Stage) -> None:
    """At ZeRO 0 the gradients are whole when the optimizer steps: measures and clips them there, on every layout."""
    parameters = list(stage.chain.parameters())

    def clip(*_: object) -> None:
        engine.clipped_norm = global_norm(parameters, engine.grid)
        clip_gradients(parameters, engine.clipped_norm, engine.clip_norm)

    optimizer.register_step_pre_hook(clip)
