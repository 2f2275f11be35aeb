"""Configs that break a rule of data, steps, optimizer, sampling or progressive training."""

from tests.config.cases import LATENTS, TEXT, UNET, Cases

PROGRESSIVE = {"train.progressive": True}
TWO_STAGES = [{"until": 0.5, "input_size": 8}, {"until": 1.0, "input_size": 16}]
APEX = {"optimizer.name": "apex_fused_adam"}

BROKEN: Cases = {
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
    "_warmup_has_one_unit": [
        (
            {"optimizer.warmup_epochs": 2.0, "optimizer.warmup_steps": 7},
            ("warmup_steps = 7", "warmup_epochs = 2.0"),
            {"optimizer.warmup_steps": 100},
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
    "_guidance_acts_somewhere": [
        (
            {"sampling.guidance_interval": interval},
            (f"guidance_interval = {interval}", "empty"),
            {"sampling.guidance_interval": [0.2, 0.8]},
        )
        for interval in ([0.8, 0.2], [0.5, 0.5])
    ],
    "_cache_sees_whole_features": [
        *(
            (
                {"sampling.cache_threshold": 0.9, **layout},
                ("cache_threshold = 0.9", *said),
                {"sampling.cache_threshold": 1.0},
            )
            for layout, said in (
                ({"parallel.pipeline_model_parallel_size": 2}, ("pipeline_model_parallel_size = 2", "size = 1")),
                (
                    {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True},
                    ("sequence_parallel = true", "sequence_parallel = false"),
                ),
                ({"parallel.zero_stage": 3}, ("zero_stage = 3", "zero_stage = 2")),
            )
        ),
    ],
    "_cache_has_a_part": [
        (
            {"sampling.cache_threshold": 0.9, "model.num_layers": 1},
            ("cache_threshold = 0.9", "num_layers = 1"),
            {"model.num_layers": 2},
        ),
        (
            {
                "sampling.cache_threshold": 0.9,
                "model.name": "unet",
                "model.block_out_channels": [32],
                "model.transformer_layers_per_block": [1],
            },
            ("cache_threshold = 0.9", "block_out_channels = [32]"),
            {"sampling.cache_threshold": 1.0},
        ),
    ],
    "_steps_can_be_dynamic": [
        (
            {"sampling.dynamic_steps": "spectrum", **settings},
            ("dynamic_steps = spectrum", *said),
            {"sampling.dynamic_steps": "none"},
        )
        for settings, said in (
            ({"sampling.solver": "unipc"}, ("solver = unipc", "dpmpp_2m")),
            ({"sampling.eta": 0.5}, ("eta = 0.5", "eta = 0")),
            ({"sampling.timestep_spacing": "karras"}, ("timestep_spacing = karras", "= trailing")),
            ({"sampling.flow_shift": 3.0}, ("flow_shift = 3.0", "= 1.0")),
            ({"sampling.cache_threshold": 0.9}, ("cache_threshold = 0.9", "= 1.0")),
            ({"parallel.zero_stage": 3}, ("zero_stage = 3", "zero_stage = 2")),
        )
    ],
    "_text_guard_sees_pictures": [
        (
            {**LATENTS, "model.in_channels": 4, "sampling.dynamic_steps": "spectrum", "sampling.text_guard": "strokes"},
            ("text_guard = strokes", "in_channels = 4"),
            {"sampling.text_guard": "none"},
        )
    ],
    "_no_idle_sampling_settings": [
        (
            {"sampling.text_guard": "strokes"},
            ("text_guard = strokes", "dynamic_steps = none"),
            {"sampling.dynamic_steps": "seed"},
        ),
        (
            {"sampling.eta": 0.5, "sampling.solver": "ddpm"},
            ("eta = 0.5", "solver = ddpm"),
            {"sampling.solver": "ddim"},
        ),
        *(
            (
                {"sampling.flow_shift": 3.0, "sampling.timestep_spacing": spacing},
                ("flow_shift = 3.0", f"timestep_spacing = {spacing}"),
                {"sampling.timestep_spacing": "linspace"},
            )
            for spacing in ("karras", "exponential")
        ),
        *(
            (
                {f"sampling.{name}": value, "sampling.guidance": 1.0},
                (f"{name} = {value}", "guidance = 1"),
                {"sampling.guidance": 3.0},
            )
            for name, value in (("guidance_interval", [0.2, 0.8]), ("guidance_rescale", 0.7))
        ),
    ],
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
    "_balance_needs_classes": [
        ({**TEXT, "data.balanced": True}, ("balanced = true", "condition = text"), {"data.balanced": False}),
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
}
