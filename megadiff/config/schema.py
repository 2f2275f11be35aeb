"""Every setting of a run, typed and frozen. Imports no torch, so a bad setting fails in milliseconds."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _require_plain_integer(value: object) -> object:
    """Refuse true and 1.0 where a literal integer is asked for: `True == 1` would let them pass."""
    if isinstance(value, (bool, float)):
        raise ValueError("expected an integer")
    return value


def _list_to_tuple(value: object) -> object:
    """YAML and JSON know lists only, and a strict tuple field refuses them."""
    return tuple(value) if isinstance(value, list) else value


ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_require_plain_integer)]
ZeroOrOne = Annotated[Literal[0, 1], BeforeValidator(_require_plain_integer)]
Names = Annotated[tuple[str, ...], BeforeValidator(_list_to_tuple)]
Counts = Annotated[tuple[int, ...], BeforeValidator(_list_to_tuple)]
Widths = Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=1), BeforeValidator(_list_to_tuple)]
Depths = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), BeforeValidator(_list_to_tuple)]
Betas = Annotated[tuple[float, float], BeforeValidator(_list_to_tuple)]
_Share = Annotated[float, Field(ge=0, le=1)]
Jitter = Annotated[tuple[_Share, _Share, _Share], BeforeValidator(_list_to_tuple)]
Interval = Annotated[tuple[_Share, _Share], BeforeValidator(_list_to_tuple)]
_Ratio = Annotated[float, Field(ge=0)]
PathRatios = Annotated[tuple[_Ratio, _Ratio, _Ratio], BeforeValidator(_list_to_tuple)]


class Section(BaseModel):
    """A group of settings: unknown keys are refused and values never change after construction."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The network: what a checkpoint must match. `preset` fills the fields that are not given.

    The first group serves every network, the second `name: dit`, the third `name: unet`; a field of another network
    must keep its default. Tuples of a UNet have one entry a level, from the finest.
    """

    name: Literal["dit", "unet"] = "dit"
    preset: str | None = None
    input_size: int = Field(16, gt=0)
    in_channels: int = Field(3, gt=0)
    num_classes: int = Field(10, gt=0)
    learn_sigma: bool = False
    time_freq_shift: ZeroOrOne = 0
    dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    attention_tile_size: int = Field(0, ge=0)

    patch_size: int = Field(2, gt=0)
    hidden_size: int = Field(128, gt=0)
    num_layers: int = Field(6, gt=0)
    num_heads: int = Field(4, gt=0)
    mlp_ratio: float = Field(4.0, gt=0)
    qk_norm: bool = False
    long_skips: bool = False
    position_size: int = Field(0, ge=0)

    condition: Literal["class", "text", "none"] = "class"
    block_out_channels: Widths = (64, 128)
    layers_per_block: int = Field(2, gt=0)
    transformer_layers_per_block: Depths = (0, 1)
    mid_block_transformer_layers: int = Field(1, ge=0)
    attention_head_dim: int = Field(32, gt=0)
    cross_attention_dim: int = Field(768, gt=0)
    text_length: int = Field(77, gt=0)
    pooled_dim: int = Field(0, ge=0)
    pixel_size: int = Field(0, ge=0)
    norm_num_groups: int = Field(32, gt=0)
    norm_eps: float = Field(1e-5, gt=0)
    resample: Literal["conv", "pool"] = "conv"
    resnet_time_scale_shift: bool = False
    skip: Literal["concat", "gated"] = "concat"
    skip_shift: bool = False
    skip_shift_strength: float = Field(0.1, ge=0)


class DiffusionConfig(Section):
    """The noise process, what the network predicts, and which timesteps count how much.

    `shift` divides alpha / sigma; with `shift_base_tokens` it is sqrt(tokens / base tokens) instead. Densities and
    weights of `importance` and of adaptive `timestep_sampling` are refitted from `refit_from_step` on (by default after
    a tenth of the run, at most 5000 steps), every `refit_every_steps` (a fiftieth, at most 1000). `perceptual_weight`
    w makes the loss (1 - w) squared error + w L1 of VGG-19 features of x0, `gram_weight` adds their Gram matrices; both
    only where the signal-to-noise ratio is above `perceptual_min_snr`.
    """

    schedule: Literal["linear", "scaled_linear", "cosine", "hybrid", "flow"] = "cosine"
    num_train_timesteps: int = Field(1000, gt=0)
    hybrid_linear_fraction: float = Field(0.3, ge=0, le=1)
    zero_terminal_snr: bool = False
    shift: float = Field(1.0, gt=0)
    shift_base_tokens: int = Field(0, ge=0)
    prediction: Literal["eps", "x0", "v", "flow"] = "v"
    loss_weight: Literal["uniform", "min_snr"] = "uniform"
    min_snr_gamma: float = Field(5.0, gt=0)
    timestep_sampling: Literal["uniform", "logit_normal", "adaptive"] = "uniform"
    logit_normal_mean: float = 0.0
    logit_normal_std: float = Field(1.0, gt=0)
    importance: Literal["none", "weight", "density"] = "none"
    importance_density: Literal["gradient", "loss", "published"] = "gradient"
    num_levels: int = Field(100, gt=0)
    refit_from_step: int | None = Field(None, gt=0)
    refit_every_steps: int | None = Field(None, gt=0)
    condition_dropout: float = Field(0.1, ge=0, le=1)
    perceptual_weight: float = Field(0.0, ge=0, le=1)
    gram_weight: float = Field(0.0, ge=0)
    perceptual_min_snr: float = Field(1.0, ge=0)
    vgg_path: str | None = None
    vae_path: str | None = None


class SamplingConfig(Section):
    """How noise becomes images, with classifier-free guidance; also for the picture grids during training.

    `steps` is the number of noise levels; heun calls the network twice at all but the first. `guidance` acts between
    two shares of time, 1 being noise; `guidance_rescale` gives guided answers the deviation of unguided ones. Parts of
    the network whose input has a cosine above `cache_threshold` to an earlier one are reused; 1 reuses none. With
    `dynamic_steps` each picture takes longer steps than 1 / `steps` of time once it stands out of its noise (`spectrum`
    also takes shorter ones at the end), and `text_guard` shortens them where it sees text.
    """

    solver: Literal[
        "ddim",
        "ddpm",
        "euler",
        "heun",
        "dpmpp_1",
        "dpmpp_2m",
        "dpmpp_3m",
        "dpmpp_2s",
        "dpmpp_3s",
        "dpmpp_1_sde",
        "dpmpp_2m_sde",
        "dpmpp_3m_sde",
        "dpmpp_2s_sde",
        "dpmpp_3s_sde",
        "unipc",
    ] = "ddim"
    steps: int = Field(50, gt=0)
    timestep_spacing: Literal["trailing", "leading", "linspace", "karras", "exponential"] = "trailing"
    flow_shift: float = Field(1.0, gt=0)
    guidance: float = Field(2.0, ge=0)
    guidance_interval: Interval = (0.0, 1.0)
    guidance_rescale: float = Field(0.0, ge=0, le=1)
    eta: float = Field(0.0, ge=0, le=1)
    clip_x0: bool = False
    cache_threshold: float = Field(1.0, gt=0, le=1)
    dynamic_steps: Literal["none", "spectrum", "seed"] = "none"
    text_guard: str = "none"


class DataConfig(Section):
    """Where the pictures come from; their size is `model.input_size`. `balanced` shows all classes equally often.

    `random_crop` is the largest share of a side that is cut off; `hsv_jitter` the largest turn of the hue (a share of
    the circle) and changes of saturation and value.
    """

    name: Literal["emoji", "fashion_mnist", "image_folder", "latents", "ids"] = "emoji"
    path: str | None = None
    grouping: Literal["category", "subgroup"] = "subgroup"
    classes: Names = ()
    balanced: bool = False
    flip: bool = False
    random_crop: float = Field(0.0, ge=0, lt=1)
    hsv_jitter: Jitter = (0.0, 0.0, 0.0)
    num_samples: int = Field(1024, gt=0)
    prefetch_batches: int = Field(2, ge=0)


class ProgressiveStage(Section):
    """A stage of progressive training: until which share of `train.steps`, at which size, with what changed.

    What is not given stays as in the run: the batch, the shift of the schedule, the learning rate.
    """

    until: float = Field(gt=0, le=1)
    input_size: int = Field(gt=0)
    global_batch_size: int | None = Field(None, gt=0)
    shift: float | None = Field(None, gt=0)
    lr_ratio: float = Field(1.0, ge=0)


class TrainConfig(Section):
    """How long, how much at a time, and with which arithmetic.

    `progressive` trains in `stages`; without any at a quarter, half and all of `model.input_size`.
    """

    steps: int = Field(1000, gt=0)
    stop_at_step: int | None = Field(None, gt=0)
    global_batch_size: int = Field(64, gt=0)
    micro_batch_size: int | None = Field(None, gt=0)
    gradient_accumulation_steps: int | None = Field(None, gt=0)
    seed: int = Field(0, ge=0, lt=2**63)
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    activation_checkpoint_every_blocks: int = Field(2, gt=0)
    attention_backend: Literal["auto", "math", "efficient", "flash", "flash_attn"] = "auto"
    kernels: Literal["auto", "required", "off"] = "auto"
    norm_backend: Literal["torch", "apex"] = "torch"
    compile: bool = False
    progressive: bool = False
    stages: Annotated[tuple[ProgressiveStage, ...], BeforeValidator(_list_to_tuple)] = ()


class OptimizerConfig(Section):
    """The optimizer, its learning-rate schedule in optimizer steps, and the clipping of the global norm.

    `preset` fills the fields that are not given. `warmup_epochs` above 0 is the warm-up in passes over the data.
    The rate of the last `final_fraction` of the steps is multiplied with `final_lr_ratio`. `path_lr_ratios` multiply
    that of a UNet's way down (with the embeddings), middle and way up. Clipping happens at every `clip_every_steps`-th
    step; anything above 1 lets large gradients through between.
    """

    preset: str | None = None
    name: Literal["adamw", "adamw_ema", "apex_fused_adam", "lion", "sgd"] = "adamw"
    lr: float = Field(1e-4, ge=0)
    betas: Betas = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    clip_norm: float = Field(1.0, ge=0)
    clip_every_steps: int = Field(1, gt=0)
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = Field(100, ge=0)
    warmup_epochs: float = Field(0.0, ge=0)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    final_fraction: float = Field(0.0, ge=0, le=1)
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    path_lr_ratios: PathRatios = (1.0, 1.0, 1.0)


class EmaConfig(Section):
    """The float32 moving average of the weights, one update an applied optimizer step."""

    enabled: bool = True
    decay: float = Field(0.9999, ge=0, lt=1)
    warmup: bool = True


class ParallelConfig(Section):
    """The layout. Data parallelism takes the ranks that tensor and pipeline leave over."""

    tensor_model_parallel_size: int = Field(1, gt=0)
    pipeline_model_parallel_size: int = Field(1, gt=0)
    sequence_parallel: bool = False
    pipeline_schedule: Literal["auto", "1f1b", "folded"] = "auto"
    partition: Counts = ()
    zero_stage: ZeroStage | None = None
    timeout_seconds: int = Field(1800, gt=0)


class CheckpointConfig(Section):
    """When to save and how many checkpoints to keep (0 keeps all). The last step is always saved."""

    save_every_steps: int = Field(1000, gt=0)
    keep_last: int = Field(3, ge=0)


class MonitorConfig(Section):
    """What is shown while the run goes on. `sample_every_steps` 0 makes no pictures.

    Every `evaluate_every_steps` (0 for never) as many pictures are made as real ones are chosen, `evaluate_images`, and
    compared in the space `evaluate_features`: `embedded`, `inception` with its `evaluate_weights`, or a local folder.
    """

    log_every_steps: int = Field(10, gt=0)
    sample_every_steps: int = Field(500, ge=0)
    samples_per_class: int = Field(4, gt=0)
    evaluate_every_steps: int = Field(0, ge=0)
    evaluate_images: int = Field(256, gt=5)  # density and coverage look at five other pictures
    evaluate_features: str = "embedded"
    evaluate_weights: str | None = None
    tensorboard: bool = True


class Config(Section):
    """A whole run. `deepspeed` holds the checked content of the DeepSpeed JSON."""

    model: ModelConfig = ModelConfig()
    diffusion: DiffusionConfig = DiffusionConfig()
    sampling: SamplingConfig = SamplingConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    deepspeed: dict[str, Any] = {}
