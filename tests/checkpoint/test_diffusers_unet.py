"""UNets under diffusers' names: its classes load the export and compute the same, and what they save is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from torch import Tensor, nn

from megadiff.checkpoint import CheckpointReader, find_checkpoint
from megadiff.checkpoint.export import ExportSettings, export_weights
from megadiff.checkpoint.import_ import ImportSettings, import_weights
from megadiff.checkpoint.names import Origin, parameter_shapes, row_shape
from megadiff.checkpoint.names_diffusers import DIFFUSERS
from megadiff.config.load import load_config
from megadiff.config.presets import preset_values
from megadiff.config.schema import Config, ModelConfig
from megadiff.errors import CheckpointError
from megadiff.models import build_network
from tests.checkpoint.networks import our_output, random_run, random_weights

CLASS: dict[str, Any] = {"preset": "unet-tiny-test", "num_classes": 5}
TEXT: dict[str, Any] = {"preset": "unet-text-tiny-test"}
NETWORKS: dict[str, dict[str, Any]] = {
    "classes": CLASS,
    "no condition": {"preset": "unet-tiny-test", "condition": "none"},
    "scaled": {**CLASS, "resnet_time_scale_shift": True},
    "learnt variance": {**CLASS, "learn_sigma": True, "time_freq_shift": 1, "layers_per_block": 2},
    "without attention": {
        **CLASS,
        "transformer_layers_per_block": (0, 0),
        "mid_block_transformer_layers": 0,
        "attention_head_dim": 32,
    },
    "attention in the middle": {**CLASS, "transformer_layers_per_block": (0, 0), "attention_head_dim": 16},
    "three levels": {
        **CLASS,
        "block_out_channels": (8, 16, 24),
        "transformer_layers_per_block": (1, 0, 1),
        "norm_eps": 1e-6,
    },
    "text": {**TEXT, "pooled_dim": 0, "pixel_size": 0},
    "text and pooled": TEXT,
    "text as in sd2": {
        **TEXT,
        "pooled_dim": 0,
        "pixel_size": 0,
        "transformer_layers_per_block": (1, 0),
        "mid_block_transformer_layers": 1,
    },
}


def config_of(options: dict[str, Any]) -> Config:
    """A run of a tiny UNet."""
    settings = {"data.name": "ids", **{f"model.{key}": value for key, value in options.items()}}
    if options.get("condition") == "none":
        settings["sampling.guidance"] = 1.0
    return load_config(None, settings)


def some_inputs(model: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(x_t, t, conditions); the last label is the null class."""
    generator = torch.Generator().manual_seed(3)
    x_t = torch.randn(3, model.in_channels, model.input_size, model.input_size, generator=generator)
    t = torch.tensor([0, 7, 999])
    if model.condition == "text":
        size = model.text_length * model.cross_attention_dim + model.pooled_dim
        return x_t, t, torch.randn(3, size, generator=generator)
    return x_t, t, torch.tensor([0, 1, model.num_classes])


def their_output(network: nn.Module, model: ModelConfig) -> Tensor:
    """What a class of diffusers computes for `some_inputs`."""
    x_t, t, conditions = some_inputs(model)
    with torch.no_grad():
        if model.condition != "text":
            labels = conditions if model.condition == "class" else None
            return network.eval()(x_t, t, class_labels=labels).sample
        tokens = model.text_length * model.cross_attention_dim
        text, pooled = conditions.split((tokens, model.pooled_dim), dim=1)
        text = text.unflatten(1, (model.text_length, model.cross_attention_dim))
        size = float(model.pixel_size)
        ids = torch.tensor([[size, size, 0.0, 0.0, size, size]]).expand(3, -1)
        added = {"text_embeds": pooled, "time_ids": ids} if model.pooled_dim else None
        return network.eval()(x_t, t, encoder_hidden_states=text, added_cond_kwargs=added).sample


def class_of(model: ModelConfig) -> type[UNet2DModel] | type[UNet2DConditionModel]:
    return UNet2DConditionModel if model.condition == "text" else UNet2DModel


@pytest.mark.parametrize("name", NETWORKS)
def test_diffusers_loads_the_export_and_computes_the_same(name: str, tmp_path: Path) -> None:
    config = config_of(NETWORKS[name])
    run = random_run(tmp_path / "run", config)
    export_weights(run, tmp_path / "out", ExportSettings("diffusers"))
    theirs, report = class_of(config.model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    ours = our_output(config, random_weights(config, 2), some_inputs(config.model))
    assert ours.std() > 0.01, "an output near zero would agree with anything"
    torch.testing.assert_close(their_output(theirs, config.model), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_diffusers_saves_is_read_back(name: str, tmp_path: Path) -> None:
    """Through diffusers: its own config.json, which states every option, and its own file of weights."""
    config = config_of(NETWORKS[name])
    run = random_run(tmp_path / "run", config)
    export_weights(run, tmp_path / "out", ExportSettings("diffusers"))
    class_of(config.model).from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "theirs")
    found = import_weights(tmp_path / "theirs", tmp_path / "back", ImportSettings("diffusers", config=config))
    assert found.model == config.model
    without = import_weights(tmp_path / "theirs", tmp_path / "alone", ImportSettings("diffusers"))
    untold: dict[str, Any] = {"preset": None}
    if config.model.condition == "text":
        untold |= {"text_length": 77, "pixel_size": 8 * config.model.input_size * bool(config.model.pooled_dim)}
    assert without.model == config.model.model_copy(update=untold)
    expected = random_weights(config, 2)
    reader = CheckpointReader(find_checkpoint(tmp_path / "back"))
    for key, value in expected.items():
        assert torch.equal(reader.read("model", key), value), key


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"skip": "gated"}, "model.skip = gated"),
        ({"skip_shift": True}, "model.skip_shift = true"),
        ({"attention_tile_size": 2}, "model.attention_tile_size = 2"),
        ({"resample": "pool"}, "model.resample = pool"),
    ],
)
def test_what_diffusers_does_not_know_is_refused_and_kept_in_the_native_format(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = config_of({**CLASS, **options})
    run = random_run(tmp_path / "run", config)
    with pytest.raises(CheckpointError, match=reason):
        export_weights(run, tmp_path / "out", ExportSettings("diffusers"))
    assert not (tmp_path / "out").exists()
    export_weights(run, tmp_path / "native", ExportSettings("native"))
    given = ImportSettings("native", config=config)
    assert import_weights(tmp_path / "native", tmp_path / "back", given).model == config.model


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mid_block_transformer_layers": 0}, "mid_block_transformer_layers = 0"),
        ({"mid_block_transformer_layers": 1}, "mid_block_transformer_layers = 1"),
        ({"pixel_size": 0}, "model.pixel_size = 0"),
    ],
)
def test_a_middle_or_a_pooled_text_that_diffusers_cannot_hold_is_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    run = random_run(tmp_path / "run", config_of({**TEXT, **options}))
    with pytest.raises(CheckpointError, match=reason):
        export_weights(run, tmp_path / "out", ExportSettings("diffusers"))


SMALL_UNET: dict[str, Any] = {"sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4}
BLOCKS = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
CROSS_BLOCKS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": (2, 4),
    "cross_attention_dim": 12,
    "use_linear_projection": True,
}


@pytest.mark.parametrize(
    ("is_text", "changes", "message"),
    [
        (False, {"time_embedding_type": "fourier"}, "time_embedding_type = 'fourier'.*needed is 'positional'"),
        (False, {"class_embed_type": "timestep"}, "class_embed_type = 'timestep'"),
        (False, {"flip_sin_to_cos": False}, "flip_sin_to_cos = False.*needed is True"),
        (False, {"downsample_type": "resnet"}, "downsample_type = 'resnet'.*needed is 'conv'"),
        (False, {"act_fn": "gelu"}, "act_fn = 'gelu'"),
        (False, {"out_channels": 5}, "out_channels = 5 for in_channels = 3"),
        (False, {"time_embedding_dim": 64}, "time_embedding_dim = 64; needed is 32"),
        (False, {"resnet_time_scale_shift": "scale_shift"}, "attn_norm_num_groups = None; only norm_num_groups = 4"),
        (
            False,
            {"down_block_types": ("DownBlock2D", "SkipDownBlock2D")},
            "down_block_types.*needed is 'DownBlock2D' or 'AttnDownBlock2D'",
        ),
        (False, {"up_block_types": ("UpBlock2D", "AttnUpBlock2D")}, "only a way up that mirrors the way down"),
        (
            False,
            {
                "attention_head_dim": None,
                "down_block_types": ("AttnDownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D"),
            },
            r"attention_head_dim = None, which makes heads of \[8, 16\] channels",
        ),
        (True, {"use_linear_projection": False}, "use_linear_projection = False.*needed is True"),
        (True, {"dual_cross_attention": True}, "dual_cross_attention = True"),
        (True, {"only_cross_attention": True}, "only_cross_attention = True"),
        (True, {"attention_head_dim": 2}, r"attention_head_dim = \[2, 2\], which makes heads of \[4, 8\] channels"),
        (True, {"resnet_skip_time_act": True}, "resnet_skip_time_act = True"),
        (True, {"encoder_hid_dim": 8}, "encoder_hid_dim = 8"),
        (True, {"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"}, "mid_block_type = 'UNetMidBlock2DSimpleCrossAttn'"),
        (True, {"transformer_layers_per_block": [1, 1, 1]}, "transformer_layers_per_block.*2 levels"),
        (True, {"addition_embed_type": "text"}, "addition_embed_type = 'text'"),
        (
            True,
            {
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 54,
            },
            "addition_time_embed_dim = 8",
        ),
        (True, {"new_option": 3}, "new_option = 3, which is not known here"),
    ],
)
def test_options_that_our_unet_cannot_hold_are_named(is_text: bool, changes: dict[str, Any], message: str) -> None:
    name = "UNet2DConditionModel" if is_text else "UNet2DModel"
    content = {"_class_name": name, **SMALL_UNET, **(CROSS_BLOCKS if is_text else BLOCKS), **changes}
    config = json.loads(json.dumps(content))
    with pytest.raises(CheckpointError, match=message) as caught:
        DIFFUSERS.read_model(Origin({}, {}, config))
    assert "\n" not in str(caught.value)


# What is published of the UNets of Stable Diffusion 2.1 and SDXL, as far as it is not diffusers' default.
PUBLISHED: dict[str, dict[str, Any]] = {
    "sd2": {
        "sample_size": 64,
        "attention_head_dim": [5, 10, 20, 20],
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
        "block_out_channels": [320, 640, 1280, 1280],
    },
    "sdxl": {
        "sample_size": 128,
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_names_and_shapes_of_the_published_networks(preset: str) -> None:
    with torch.device("meta"):
        theirs = UNet2DConditionModel.from_config(PUBLISHED[preset])
    config = json.loads(json.dumps(dict(theirs.config)))
    model = DIFFUSERS.read_model(Origin({}, {}, {**config, "_class_name": "UNet2DConditionModel"}))
    values = preset_values(preset)
    assert {name: getattr(model, name) for name in values} == values
    shapes = parameter_shapes(model)
    found = {row.theirs: row_shape(row, shapes, model) for row in DIFFUSERS.rows(model)}
    assert found == {name: tuple(value.shape) for name, value in theirs.state_dict().items()}


def test_every_parameter_goes_somewhere_once() -> None:
    for options in NETWORKS.values():
        model = config_of(options).model
        used = [name for row in DIFFUSERS.rows(model) for name in row.ours]
        assert sorted(used) == sorted(name for name, _ in build_network(model, 0).named_parameters())
