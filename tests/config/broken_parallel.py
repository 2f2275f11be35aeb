"""Configs that break a rule between the layout and the network."""

from tests.config.cases import TEXT, UNET, Cases

TENSOR, PIPELINE = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"

BROKEN: Cases = {
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
