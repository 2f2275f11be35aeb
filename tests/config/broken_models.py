"""Configs that break a rule between the settings of a network."""

from tests.config.cases import LATENTS, TEXT, UNET, Cases

TWO_DEPTHS = {"model.transformer_layers_per_block": [1, 1]}
THREE_DEPTHS = {"model.transformer_layers_per_block": [0, 0, 1]}
NO_ATTENTION = {"model.transformer_layers_per_block": [0, 0], "model.mid_block_transformer_layers": 0}
PLAIN_UNET = {"model.name": "unet", **NO_ATTENTION}

BROKEN: Cases = {
    "_patch_divides_input": [({"model.patch_size": 3}, ("= 3", "= 16", "1, 2, 4, 8 or 16"), {"model.patch_size": 4})],
    "_heads_divide_hidden": [({"model.num_heads": 3}, ("= 3", "= 128"), {"model.num_heads": 8})],
    "_hidden_fits_positions": [
        ({"model.hidden_size": 30, "model.num_heads": 2}, ("= 30", "use 32"), {"model.hidden_size": 32})
    ],
    "_positions_cover_whole_tokens": [
        ({"model.position_size": 33}, ("= 33", "patch_size = 2", "32 or 34"), {"model.position_size": 32})
    ],
    "_mlp_width_is_whole": [({"model.mlp_ratio": 1.003}, ("1.003", "128"), {"model.mlp_ratio": 1.5})],
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
}
