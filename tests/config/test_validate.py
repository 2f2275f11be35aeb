"""Every rule between settings has a config that breaks it, and the message has the values and the remedy."""

from typing import Any

import pytest

from megadiff.config.load import load_config
from megadiff.config.validate import CHECKS
from megadiff.errors import ConfigError

LATENTS = {"data.name": "latents", "data.path": "/latents"}
APEX = {"optimizer.name": "apex_fused_adam"}

# name of the check -> (settings that break it, parts of the message, settings that repair it)
BROKEN: dict[str, list[tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]]] = {
    "_patch_divides_input": [({"model.patch_size": 3}, ("= 3", "= 16", "1, 2, 4, 8 or 16"), {"model.patch_size": 4})],
    "_heads_divide_hidden": [({"model.num_heads": 3}, ("= 3", "= 128"), {"model.num_heads": 8})],
    "_hidden_fits_positions": [
        ({"model.hidden_size": 30, "model.num_heads": 2}, ("= 30", "use 32"), {"model.hidden_size": 32})
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
    "_flip_has_meaning": [({"data.flip": True, **LATENTS}, ("flip", "latents"), {"data.flip": False})],
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
        ({"train.norm_backend": "apex"}, ("norm_backend = apex", "qk_norm = false"), {"model.qk_norm": True})
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
            {"diffusion.min_snr_gamma": 4.0},
            ("min_snr_gamma", "uniform"),
            {"diffusion.loss_weight": "min_snr"},
        ),
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
        )
    ],
    "_stages_have_layers": [
        ({"parallel.pipeline_model_parallel_size": 9}, ("= 9", "8 layers"), {"model.num_layers": 7}),
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
    assert set(BROKEN) == {check.__name__ for check in CHECKS}


@pytest.mark.parametrize(("name", "settings", "parts", "repair"), CASES, ids=[case[0] for case in CASES])
def test_broken_rule_is_reported_and_the_remedy_works(
    name: str, settings: dict[str, Any], parts: tuple[str, ...], repair: dict[str, Any]
) -> None:
    if name == "_tokens_split_over_tensor":
        # Six pixels with patch 2 are 9 tokens.
        assert (settings["model.input_size"] // 2) ** 2 == 9
    with pytest.raises(ConfigError) as error:
        load_config(None, settings)
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
    load_config(None, settings | repair)


def test_b05_guidance_of_one_needs_no_condition_dropout() -> None:
    config = load_config(None, {"diffusion.condition_dropout": 0.0, "sampling.guidance": 1.0})
    assert config.diffusion.condition_dropout == 0
