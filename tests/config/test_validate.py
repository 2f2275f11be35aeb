"""Every rule between settings has a config that breaks it, and the message has the values and the remedy."""

from typing import Any, get_args

import pytest

from megadiff.config.keys import FIELDS
from megadiff.config.load import load_config
from megadiff.config.networks import FIELDS_OF_NETWORK
from megadiff.config.schema import Config, ModelConfig
from megadiff.config.validate import checks_for
from megadiff.errors import ConfigError

LATENTS = {"data.name": "latents", "data.path": "/latents"}
EPS, DENSITY = {"diffusion.prediction": "eps"}, {"diffusion.importance": "density"}
FEATURES = {"diffusion.perceptual_weight": 0.3, "diffusion.vgg_path": "/vgg.pth"}
PROGRESSIVE = {"train.progressive": True}
TWO_STAGES = [{"until": 0.5, "input_size": 8}, {"until": 1.0, "input_size": 16}]
APEX = {"optimizer.name": "apex_fused_adam"}
# 16 and 32 channels on 8 x 8 and 4 x 4 pixels in 8 groups; the second level and the middle attend, in heads of 8.
UNET = {"model.preset": "unet-tiny-test"}
# The same with texts and a transformer at both levels.
TEXT = {"model.preset": "unet-text-tiny-test", **LATENTS}
TWO_DEPTHS = {"model.transformer_layers_per_block": [1, 1]}
THREE_DEPTHS = {"model.transformer_layers_per_block": [0, 0, 1]}
TEXT_DEFAULTS = {"cross_attention_dim": 768, "text_length": 77, "pooled_dim": 0, "pixel_size": 0}
NO_ATTENTION = {"model.transformer_layers_per_block": [0, 0], "model.mid_block_transformer_layers": 0}
PLAIN_UNET = {"model.name": "unet", **NO_ATTENTION}
TENSOR, PIPELINE = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"

# name of the check -> (settings that break it, parts of the message, settings that repair it)
BROKEN: dict[str, list[tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]]] = {
    "_eps_sees_signal": [
        ({**EPS, "diffusion.schedule": "flow"}, ("prediction = eps", "schedule = flow"), {"diffusion.prediction": "v"}),
        (
            {**EPS, "diffusion.zero_terminal_snr": True},
            ("prediction = eps", "zero_terminal_snr = true"),
            {"diffusion.prediction": "x0"},
        ),
    ],
    "_one_density": [
        ({**DENSITY, "diffusion.timestep_sampling": name}, ("density", name), {"diffusion.importance": "weight"})
        for name in ("logit_normal", "adaptive")
    ],
    "_one_shift": [
        (
            {"diffusion.shift": 3.0, "diffusion.shift_base_tokens": 16},
            ("shift = 3.0", "shift_base_tokens = 16"),
            {"diffusion.shift_base_tokens": 0},
        )
    ],
    "_rescaled_schedule_has_two_ends": [
        (
            {"diffusion.zero_terminal_snr": True, "diffusion.num_train_timesteps": 1, "sampling.steps": 1},
            ("num_train_timesteps = 1", "at least 2"),
            {"diffusion.num_train_timesteps": 2},
        )
    ],
    "_levels_have_timesteps": [
        (
            {**DENSITY, "diffusion.num_levels": 1001},
            ("num_levels = 1001", "= 1000"),
            {"diffusion.num_levels": 1000},
        )
    ],
    "_refit_happens": [
        (
            {**DENSITY, "diffusion.refit_from_step": 1000},
            ("= 1000", "at most 999"),
            {"diffusion.refit_from_step": 999},
        )
    ],
    "_features_have_weights": [
        ({"diffusion.perceptual_weight": 0.3}, ("perceptual_weight", "vgg_path"), {"diffusion.vgg_path": "/vgg.pth"}),
        ({"diffusion.gram_weight": 0.3}, ("gram_weight", "vgg_path"), {"diffusion.vgg_path": "/vgg.pth"}),
    ],
    "_features_see_pixels": [
        ({**FEATURES, **LATENTS}, ("data.name = latents", "vae_path"), {"diffusion.vae_path": "/vae"}),
        (
            {**FEATURES, "data.name": "ids", "model.in_channels": 4},
            ("in_channels = 4", "1 or 3"),
            {"model.in_channels": 3},
        ),
        ({**FEATURES, "model.input_size": 2}, ("input_size = 2", "at least 4"), {"model.input_size": 4}),
    ],
    "_no_idle_diffusion_settings": [
        *(
            ({f"diffusion.{name}": value}, (name, "perceptual_weight = 0"), FEATURES)
            for name, value in (("perceptual_min_snr", 2.0), ("vgg_path", "/vgg.pth"))
        ),
        ({**FEATURES, "diffusion.vae_path": "/vae"}, ("vae_path", "data.name = emoji"), LATENTS),
        ({"diffusion.min_snr_gamma": 4.0}, ("min_snr_gamma", "uniform"), {"diffusion.loss_weight": "min_snr"}),
        (
            {"diffusion.hybrid_linear_fraction": 0.7},
            ("hybrid_linear_fraction = 0.7", "cosine"),
            {"diffusion.schedule": "hybrid"},
        ),
        (
            {"diffusion.zero_terminal_snr": True, "diffusion.schedule": "flow"},
            ("zero_terminal_snr", "schedule = flow"),
            {"diffusion.schedule": "cosine"},
        ),
        (
            {"diffusion.logit_normal_mean": 0.5},
            ("logit_normal_mean", "uniform"),
            {"diffusion.timestep_sampling": "logit_normal"},
        ),
        (
            {"diffusion.logit_normal_std": 0.5, "diffusion.timestep_sampling": "adaptive"},
            ("logit_normal_std", "adaptive"),
            {"diffusion.timestep_sampling": "logit_normal"},
        ),
        (
            {"diffusion.importance_density": "loss", "diffusion.importance": "weight"},
            ("importance_density = loss", "importance = weight"),
            {"diffusion.importance": "density"},
        ),
        *(
            (
                {f"diffusion.{name}": 50},
                (f"{name} = 50", "importance = none"),
                {"diffusion.timestep_sampling": "adaptive"},
            )
            for name in ("num_levels", "refit_from_step", "refit_every_steps")
        ),
    ],
    "_patch_divides_input": [({"model.patch_size": 3}, ("= 3", "= 16", "1, 2, 4, 8 or 16"), {"model.patch_size": 4})],
    "_heads_divide_hidden": [({"model.num_heads": 3}, ("= 3", "= 128"), {"model.num_heads": 8})],
    "_hidden_fits_positions": [
        ({"model.hidden_size": 30, "model.num_heads": 2}, ("= 30", "use 32"), {"model.hidden_size": 32})
    ],
    "_positions_cover_whole_tokens": [
        ({"model.position_size": 33}, ("= 33", "patch_size = 2", "32 or 34"), {"model.position_size": 32})
    ],
    "_stages_are_wanted": [
        ({"train.stages": [{"until": 1.0, "input_size": 8}]}, ("stages", "progressive = false"), PROGRESSIVE)
    ],
    "_stages_are_in_order": [
        ({**PROGRESSIVE, "train.stages": stages}, ("0.5", "rising order up to 1"), {"train.stages": TWO_STAGES})
        for stages in (
            [{"until": 0.5, "input_size": 8}],
            [{"until": 0.5, "input_size": 8}, {"until": 0.5, "input_size": 8}, {"until": 1.0, "input_size": 16}],
            [{"until": 1.0, "input_size": 8}, {"until": 0.5, "input_size": 16}],
        )
    ],
    "_stages_have_steps": [
        (
            {**PROGRESSIVE, "train.steps": 1, "optimizer.warmup_steps": 0, "train.stages": TWO_STAGES},
            ("stages[0]", "steps = 1"),
            {"train.steps": 4},
        )
    ],
    "_mlp_width_is_whole": [({"model.mlp_ratio": 1.003}, ("1.003", "128"), {"model.mlp_ratio": 1.5})],
    "_channels_fit_data": [
        ({"model.preset": "DiT-XL/2"}, ("DiT-XL/2", "= 4", "emoji", "latents"), LATENTS),
        ({"model.in_channels": 4}, ("= 4", "emoji", "in_channels = 3"), {"model.in_channels": 3}),
    ],
    "_data_has_path": [
        ({"data.name": name}, (name, "data.path"), {"data.path": "/x"})
        for name in ("fashion_mnist", "image_folder", "latents")
    ],
    "_emoji_size": [({"model.input_size": 96}, ("96", "72"), {"model.input_size": 72})],
    "_augmentation_has_meaning": [
        ({f"data.{name}": value, **LATENTS}, (name, "latents"), {f"data.{name}": off})
        for name, value, off in (
            ("flip", True, False),
            ("random_crop", 0.2, 0.0),
            ("hsv_jitter", [0.1, 0.2, 0.2], [0.0, 0.0, 0.0]),
        )
    ],
    "_jitter_needs_colours": [
        (
            {
                "data.hsv_jitter": [0.1, 0.2, 0.2],
                "model.in_channels": 1,
                "data.name": "image_folder",
                "data.path": "/x",
            },
            ("hsv_jitter = [0.1, 0.2, 0.2]", "in_channels = 1"),
            {"model.in_channels": 3},
        )
    ],
    "_warmup_ends_before_run": [({"train.steps": 100}, ("= 100", "at most 99"), {"optimizer.warmup_steps": 99})],
    "_stop_within_horizon": [
        ({"train.stop_at_step": 1001}, ("1001", "1000"), {"train.stop_at_step": 1000}),
    ],
    "_flash_needs_half": [({"train.attention_backend": "flash"}, ("flash", "fp32"), {"train.precision": "bf16"})],
    "_guidance_needs_condition_dropout": [
        (
            {"diffusion.condition_dropout": 0.0},
            ("guidance = 2.0", "condition_dropout"),
            {"sampling.guidance": 1.0},
        ),
    ],
    "_sampling_steps_exist": [({"sampling.steps": 1001}, ("1001", "1000"), {"sampling.steps": 1000})],
    "_betas_below_one": [({"optimizer.betas": [0.9, 1.0]}, ("betas[1] = 1.0",), {"optimizer.betas": [0.9, 0.99]})],
    "_apex_fits": [
        ({**APEX, "parallel.zero_stage": 3}, ("apex_fused_adam", "zero_stage = 3"), {"parallel.zero_stage": 2}),
        (
            {**APEX, "parallel.zero_stage": 1, "deepspeed.zero_optimization.offload_optimizer.device": "cpu"},
            ("apex_fused_adam", "offload_optimizer.device = cpu"),
            {"optimizer.name": "adamw_ema"},
        ),
        ({**APEX, "train.precision": "fp64"}, ("apex_fused_adam", "fp64"), {"optimizer.name": "adamw"}),
    ],
    "_norm_backend_has_a_norm": [
        ({"train.norm_backend": "apex"}, ("norm_backend = apex", "qk_norm = false"), {"model.qk_norm": True}),
        ({"train.norm_backend": "apex", **UNET}, ("apex", "unet", "= torch"), {"train.norm_backend": "torch"}),
    ],
    "_settings_of_this_network": [
        ({"model.norm_num_groups": 16}, ("norm_num_groups = 16", "name = dit"), {"model.name": "unet"}),
        ({"model.condition": "none"}, ("condition = none", "name = dit"), {"model.condition": "class"}),
        ({"model.block_out_channels": [64, 96]}, ("[64, 96]", "name = dit"), {"model.name": "unet"}),
        (
            {"model.name": "unet", "model.qk_norm": True},
            ("qk_norm = True", "name = unet", "name = dit"),
            {"model.name": "dit"},
        ),
        (
            {"model.preset": "dit-tiny-test", "model.name": "unet"},
            ("hidden_size = 32", "name = unet"),
            {"model.preset": "unet-tiny-test"},
        ),
    ],
    "_tiles_divide_maps": [
        ({"model.attention_tile_size": 8}, ("= 8", "8 tokens a side", "less than 8"), {"model.attention_tile_size": 4}),
        ({"model.attention_tile_size": 3}, ("= 3", "with 8 tokens", "1, 2 or 4"), {"model.attention_tile_size": 4}),
        (
            {
                **UNET,
                "model.input_size": 24,
                "model.attention_tile_size": 5,
                "model.transformer_layers_per_block": [1, 1],
            },
            ("= 5", "24 or 12 tokens", "1, 2, 3, 4, 6 or 12"),
            {"model.attention_tile_size": 12},
        ),
        (
            {**UNET, "model.attention_tile_size": 4},
            ("= 4", "has 4 tokens a side"),
            {"model.transformer_layers_per_block": [1, 1]},
        ),
    ],
    "_levels_have_depths": [
        (
            {**UNET, "model.block_out_channels": [16, 32, 32]},
            ("[0, 1]", "2 entries", "3 levels", "[16, 32, 32]"),
            {"model.transformer_layers_per_block": [0, 0, 1]},
        )
    ],
    "_first_level_fits_timesteps": [
        (
            {**PLAIN_UNET, "model.norm_num_groups": 1, "model.block_out_channels": [width, 8]},
            (f"[0] = {width}", f"use {even}"),
            {"model.block_out_channels": [even, 8]},
        )
        for width, even in ((5, 6), (2, 4), (1, 4))
    ],
    "_groups_divide_channels": [
        (
            {**UNET, "model.block_out_channels": [12, 32]},
            ("= 8", "[12, 32]", "1, 2 or 4"),
            {"model.norm_num_groups": 4},
        )
    ],
    "_levels_divide_input": [
        (
            {**UNET, "model.input_size": 10, "model.block_out_channels": [16, 16, 16], **THREE_DEPTHS},
            ("= 10", "multiple of 4", "3 levels", "use 8 or 12"),
            {"model.input_size": 12},
        ),
        ({**UNET, "model.input_size": 1}, ("= 1 ", "use 2"), {"model.input_size": 2}),
    ],
    "_head_dim_divides_channels": [
        (
            {**UNET, "model.attention_head_dim": 12},
            ("= 12", "32 channels", "1, 2, 4, 8, 16 or 32"),
            {"model.attention_head_dim": 32},
        ),
        (
            {**UNET, **TWO_DEPTHS, "model.attention_head_dim": 32},
            ("= 32", "16 or 32 channels", "1, 2, 4, 8 or 16"),
            {"model.attention_head_dim": 16},
        ),
    ],
    "_attention_is_one_layer": [
        (
            {**UNET, "model.transformer_layers_per_block": [0, 2]},
            ("[0, 2]", "condition = class"),
            {"model.transformer_layers_per_block": [0, 1]},
        ),
        (
            {**UNET, "model.mid_block_transformer_layers": 2},
            ("mid_block_transformer_layers = 2", "use 0 and 1"),
            {"model.mid_block_transformer_layers": 0},
        ),
    ],
    "_text_is_read": [
        ({**TEXT, **NO_ATTENTION}, ("[0, 0]", "text"), {"model.mid_block_transformer_layers": 3}),
    ],
    "_text_comes_with_data": [
        ({**TEXT, "data.name": name}, (f"name = {name}", "text", "latents"), LATENTS)
        for name in ("emoji", "fashion_mnist", "image_folder")
    ],
    "_balance_needs_classes": [
        ({**TEXT, "data.balanced": True}, ("balanced = true", "condition = text"), {"data.balanced": False}),
    ],
    "_guidance_needs_a_condition": [
        ({**UNET, "model.condition": "none"}, ("= 2.0", "none"), {"sampling.guidance": 1.0}),
    ],
    "_no_idle_unet_settings": [
        *(
            ({**UNET, f"model.{name}": 2}, (f"{name} = 2", "condition = class"), {f"model.{name}": default})
            for name, default in (
                ("cross_attention_dim", 768),
                ("text_length", 77),
                ("pooled_dim", 0),
                ("pixel_size", 0),
            )
        ),
        ({**TEXT, "model.pooled_dim": 0}, ("pixel_size = 64", "pooled_dim = 0"), {"model.pixel_size": 0}),
        (
            {**UNET, "model.skip_shift_strength": 0.5},
            ("skip_shift_strength = 0.5", "skip_shift = false"),
            {"model.skip_shift": True},
        ),
        *(
            (
                {**PLAIN_UNET, f"model.{name}": value},
                (f"{name} = {value}", "without attention"),
                {"model.mid_block_transformer_layers": 1},
            )
            for name, value in (("attention_head_dim", 16), ("attention_dropout", 0.5), ("attention_tile_size", 4))
        ),
        (
            {**UNET, "model.condition": "none", "sampling.guidance": 1.0, "diffusion.condition_dropout": 0.2},
            ("condition_dropout = 0.2", "none"),
            {"diffusion.condition_dropout": 0.1},
        ),
    ],
    "_groups_split_over_tensor": [
        (
            {**UNET, TENSOR: 16},
            ("= 16", "norm_num_groups = 8", "1, 2, 4 or 8"),
            {"model.norm_num_groups": 16, TENSOR: 4},
        ),
        ({**UNET, TENSOR: 3}, ("= 3", "= 8", "1, 2, 4 or 8"), {TENSOR: 4}),
    ],
    "_level_heads_split_over_tensor": [
        ({**TEXT, TENSOR: 4}, ("= 4", "2 or 4 heads", "1 or 2"), {TENSOR: 2}),
        ({**TEXT, TENSOR: 4}, ("= 4", "attention_head_dim = 8"), {"model.attention_head_dim": 4}),
    ],
    "_sequence_parallel_needs_transformers": [
        (
            {**UNET, TENSOR: 2, "parallel.sequence_parallel": True},
            ("condition = class", "sequence_parallel = false"),
            {"parallel.sequence_parallel": False},
        )
    ],
    "_path_rates_have_one_optimizer": [
        (
            {**UNET, PIPELINE: 2, "parallel.zero_stage": 1, "optimizer.path_lr_ratios": [1.0, 0.5, 0.2]},
            ("[1.0, 0.5, 0.2]", "zero_stage = 1"),
            {"parallel.zero_stage": 0},
        )
    ],
    "_schedule_needs_stages": [
        ({**UNET, "parallel.pipeline_schedule": name}, (f"= {name}", "= 1"), {PIPELINE: 2})
        for name in ("1f1b", "folded")
    ],
    "_no_idle_settings": [
        ({"optimizer.momentum": 0.9}, ("momentum = 0.9", "adamw"), {"optimizer.name": "sgd"}),
        (
            {"optimizer.momentum": 0.9, "optimizer.name": "adamw_ema"},
            ("momentum = 0.9", "name = adamw_ema;"),
            {"optimizer.name": "sgd"},
        ),
        (
            {"optimizer.name": "sgd", "optimizer.betas": [0.9, 0.99]},
            ("betas", "sgd"),
            {"optimizer.name": "adamw"},
        ),
        ({"optimizer.name": "sgd", "optimizer.eps": 1e-6}, ("eps", "sgd"), {"optimizer.name": "adamw"}),
        (
            {"optimizer.name": "lion", "optimizer.eps": 1e-6},
            ("eps = 1e-06", "lion"),
            {"optimizer.name": "adamw"},
        ),
        (
            {"optimizer.clip_every_steps": 5, "optimizer.clip_norm": 0.0},
            ("clip_every_steps = 5", "clip_norm = 0"),
            {"optimizer.clip_norm": 1.0},
        ),
        (
            {"optimizer.final_lr_ratio": 0.5},
            ("final_lr_ratio = 0.5", "final_fraction = 0"),
            {"optimizer.final_fraction": 0.1},
        ),
        ({"optimizer.path_lr_ratios": [1.0, 0.5, 0.2]}, ("path_lr_ratios", "model.name = dit"), UNET),
        ({"data.num_samples": 10}, ("num_samples", "emoji"), {"data.name": "ids"}),
        ({"data.grouping": "category", "data.name": "ids"}, ("grouping", "ids"), {"data.name": "emoji"}),
    ],
    "_heads_split_over_tensor": [
        (
            {"parallel.tensor_model_parallel_size": 3},
            ("= 3", "= 4", "1, 2 or 4"),
            {"model.num_heads": 12, "model.hidden_size": 96},
        )
    ],
    "_mlp_splits_over_tensor": [
        (
            {"parallel.tensor_model_parallel_size": 4, "model.hidden_size": 12, "model.mlp_ratio": 1.5},
            ("= 4", "18"),
            {"model.mlp_ratio": 4.0},
        )
    ],
    "_sequence_parallel_needs_tensor": [
        (
            {"parallel.sequence_parallel": True},
            ("= 1", "2 or more"),
            {"parallel.tensor_model_parallel_size": 2},
        )
    ],
    "_tokens_split_over_tensor": [
        (
            {
                "parallel.sequence_parallel": True,
                "parallel.tensor_model_parallel_size": 2,
                "model.input_size": 6,
            },
            ("= 2", "9 tokens"),
            {"model.input_size": 8},
        ),
        (
            {**TEXT, "model.input_size": 6, TENSOR: 2, "parallel.sequence_parallel": True},
            ("= 2", "9 tokens (3 x 3)", "use 1, 3 or 9"),
            {"model.input_size": 12},
        ),
    ],
    "_stages_have_layers": [
        ({"parallel.pipeline_model_parallel_size": 9}, ("= 9", "8 layers"), {"model.num_layers": 7}),
        ({**UNET, PIPELINE: 9}, ("= 9", "18 stages", "16 layers", "at most 8"), {PIPELINE: 8}),
        ({**UNET, PIPELINE: 9}, ("= 9", "pipeline_schedule = 1f1b"), {"parallel.pipeline_schedule": "1f1b"}),
        ({**UNET, PIPELINE: 17, "parallel.pipeline_schedule": "1f1b"}, ("= 17", "16 layers"), {PIPELINE: 16}),
        ({PIPELINE: 5, "parallel.pipeline_schedule": "folded"}, ("10 stages", "8 layers", "at most 4"), {PIPELINE: 4}),
    ],
    "_partition_covers_chain": [
        ({"parallel.partition": [4, 4]}, ("2 entries", "= 1"), {"parallel.pipeline_model_parallel_size": 2}),
        (
            {"parallel.partition": [4, 3], "parallel.pipeline_model_parallel_size": 2},
            ("sums to 7", "8 layers"),
            {"parallel.partition": [4, 4]},
        ),
        (
            {"parallel.partition": [8, 0], "parallel.pipeline_model_parallel_size": 2},
            ("no layer",),
            {"parallel.partition": [7, 1]},
        ),
        (
            {**UNET, PIPELINE: 2, "parallel.partition": [8, 8]},
            ("2 entries", "folded, which has 4 stages"),
            {"parallel.partition": [4, 4, 4, 4]},
        ),
        (
            {**UNET, PIPELINE: 2, "parallel.partition": [4, 4, 4, 5]},
            ("sums to 17", "16 layers"),
            {"parallel.partition": [4, 4, 4, 4]},
        ),
    ],
    "_pipeline_zero_stage": [
        (
            {"parallel.pipeline_model_parallel_size": 2, "parallel.zero_stage": stage},
            (f"= {stage}", "= 2"),
            {"parallel.zero_stage": 1},
        )
        for stage in (2, 3)
    ],
    "_float64_needs_zero_0": [
        ({"train.precision": "fp64", "parallel.zero_stage": 1}, ("fp64", "= 1"), {"parallel.zero_stage": 0}),
    ],
    "_half_needs_masters": [
        ({"train.precision": half, "parallel.zero_stage": 0}, (half, "= 0"), {"parallel.zero_stage": 1})
        for half in ("bf16", "fp16")
    ],
}
CASES = [(name, *case) for name, cases in BROKEN.items() for case in cases]


def test_every_check_has_a_case() -> None:
    assert set(BROKEN) == {check.__name__ for name in FIELDS_OF_NETWORK for check in checks_for(name)}


@pytest.mark.parametrize(("name", "settings", "parts", "repair"), CASES, ids=[case[0] for case in CASES])
def test_broken_rule_is_reported_and_the_remedy_works(
    name: str, settings: dict[str, Any], parts: tuple[str, ...], repair: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, settings)
    message = str(error.value)
    assert name in [entry.name for entry in error.traceback], message
    assert all(part in message for part in parts), message
    assert "\n" not in message
    load_config(None, settings | repair)


def test_the_settings_of_the_networks_are_those_of_the_schema() -> None:
    """The schema lists the settings of every network first, then those of each."""
    own = [name for names in FIELDS_OF_NETWORK.values() for name in names]
    assert list(ModelConfig.model_fields)[-len(own) :] == own
    assert FIELDS_OF_NETWORK.keys() == set(get_args(ModelConfig.model_fields["name"].annotation))


@pytest.mark.parametrize("key", [f"model.{name}" for names in FIELDS_OF_NETWORK.values() for name in names])
def test_every_setting_of_the_other_network_is_refused(key: str) -> None:
    name = key.removeprefix("model.")
    other = "unet" if name in FIELDS_OF_NETWORK["dit"] else "dit"
    default = getattr(Config().model, name)
    options = get_args(FIELDS[key].annotation)
    value = {bool: not default, tuple: [8], str: options[-1] if options else None}.get(type(default), 8)
    with pytest.raises(ConfigError, match=rf"^model\.{name} = .* has no effect with model\.name = {other};"):
        load_config(None, {"model.name": other, key: value})


def test_b05_guidance_of_one_needs_no_condition_dropout() -> None:
    config = load_config(None, {"diffusion.condition_dropout": 0.0, "sampling.guidance": 1.0})
    assert config.diffusion.condition_dropout == 0
