"""B34 (b): every setting changes what is built or done, or is refused; a setting without a row here fails the test.

A row says which probe looks for the effect. Each probe builds a real part of a run and describes it as plain values.
"""

import copy
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch import Tensor

from megadiff.config.deepspeed_json import build_deepspeed_config
from megadiff.config.keys import FIELDS
from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.errors import ConfigError, MegadiffError
from tests.diffusion.weights import save_vae, save_vgg
from tests.engine import probes
from tests.engine.probes import Bench
from tests.evaluation.sets import save_inception, save_vision
from tests.pool import WorkerPool

TINY: dict[str, Any] = {
    "model.input_size": 4,
    "model.hidden_size": 16,
    "model.num_layers": 4,
    "model.num_heads": 2,
    "model.num_classes": 2,
    "data.name": "ids",
    "data.num_samples": 20,
    "train.steps": 20,
    "train.global_batch_size": 4,
    "optimizer.warmup_steps": 4,
    "sampling.steps": 3,
}
# The DiT's settings go back to their defaults: beside a UNet any other value is refused.
NO_DIT: dict[str, Any] = {"model.hidden_size": 128, "model.num_layers": 6, "model.num_heads": 4}
UNET: dict[str, Any] = {
    **NO_DIT,
    "model.name": "unet",
    "model.block_out_channels": [16, 32],
    "model.layers_per_block": 1,
    "model.attention_head_dim": 8,
    "model.norm_num_groups": 8,
}
TEXT: dict[str, Any] = {
    **UNET,
    "model.condition": "text",
    "model.cross_attention_dim": 12,
    "model.text_length": 5,
    "model.pooled_dim": 6,
    "model.pixel_size": 64,
}
SHIFT: dict[str, Any] = {**UNET, "model.skip_shift": True}
FOLDER = {"data.name": "image_folder", "data.path": "{folder}", "data.num_samples": 1024}
EMOJI = {"data.name": "emoji", "data.num_samples": 1024}
SHORT = {"train.steps": 4, "optimizer.warmup_steps": 0, "monitor.sample_every_steps": 2}


Probe = Callable[[Config, Bench], Any]


@dataclass(frozen=True)
class Row:
    """A value other than the default, the probe that sees it, and the settings that it needs."""

    value: Any
    probe: Probe
    base: Mapping[str, Any] = field(default_factory=dict)


def plain(value: Any) -> Any:
    """Tensors and containers as values that `==` compares."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), value.detach().double().flatten().tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


SGD = {"optimizer.name": "sgd"}
VGG = {"diffusion.perceptual_weight": 0.5, "diffusion.gram_weight": 1.0, "diffusion.vgg_path": "{vgg}"}
JUDGED = {
    **SHORT,
    "train.steps": 2,
    "monitor.evaluate_every_steps": 2,
    "monitor.evaluate_images": 8,
    "monitor.evaluate_features": "{vision}",
}
LATENTS = {"data.name": "latents", "data.path": "{folder}", "data.num_samples": 1024}
ROWS: dict[str, Row] = {
    "model.name": Row("unet", probes.network, NO_DIT),
    "model.input_size": Row(8, probes.network),
    "model.in_channels": Row(1, probes.network),
    "model.patch_size": Row(4, probes.network),
    "model.hidden_size": Row(32, probes.network),
    "model.num_layers": Row(3, probes.network),
    "model.num_heads": Row(4, probes.network),
    "model.mlp_ratio": Row(2.0, probes.network),
    "model.num_classes": Row(3, probes.network),
    "model.learn_sigma": Row(True, probes.network),
    "model.time_freq_shift": Row(1, probes.network),
    "model.qk_norm": Row(True, probes.network),
    "model.dropout": Row(0.5, probes.network),
    "model.attention_dropout": Row(0.5, probes.network),
    "model.attention_tile_size": Row(1, probes.network),
    "model.long_skips": Row(True, probes.network),
    "model.position_size": Row(8, probes.network),
    "model.condition": Row("none", probes.network, {**UNET, "sampling.guidance": 1.0}),
    "model.block_out_channels": Row([16, 16], probes.network, UNET),
    "model.layers_per_block": Row(2, probes.network, UNET),
    "model.transformer_layers_per_block": Row([1, 1], probes.network, UNET),
    "model.mid_block_transformer_layers": Row(0, probes.network, UNET),
    "model.attention_head_dim": Row(16, probes.network, UNET),
    "model.cross_attention_dim": Row(16, probes.network, TEXT),
    "model.text_length": Row(7, probes.network, TEXT),
    "model.pooled_dim": Row(8, probes.network, TEXT),
    "model.pixel_size": Row(32, probes.network, TEXT),
    "model.norm_num_groups": Row(4, probes.network, UNET),
    "model.norm_eps": Row(0.1, probes.network, UNET),
    "model.resample": Row("pool", probes.network, UNET),
    "model.resnet_time_scale_shift": Row(True, probes.network, UNET),
    "model.skip": Row("gated", probes.network, UNET),
    "model.skip_shift": Row(True, probes.network, UNET),
    "model.skip_shift_strength": Row(0.5, probes.shifts, SHIFT),
    "diffusion.schedule": Row("linear", probes.pairs),
    "diffusion.num_train_timesteps": Row(500, probes.pairs),
    "diffusion.hybrid_linear_fraction": Row(0.7, probes.pairs, {"diffusion.schedule": "hybrid"}),
    "diffusion.zero_terminal_snr": Row(True, probes.pairs),
    "diffusion.shift": Row(2.0, probes.pairs),
    "diffusion.shift_base_tokens": Row(64, probes.pairs),
    "diffusion.prediction": Row("eps", probes.pairs, {"diffusion.schedule": "linear"}),
    "diffusion.loss_weight": Row("min_snr", probes.pairs),
    "diffusion.min_snr_gamma": Row(1.0, probes.pairs, {"diffusion.loss_weight": "min_snr"}),
    "diffusion.timestep_sampling": Row("logit_normal", probes.pairs),
    "diffusion.logit_normal_mean": Row(1.0, probes.pairs, {"diffusion.timestep_sampling": "logit_normal"}),
    "diffusion.logit_normal_std": Row(0.5, probes.pairs, {"diffusion.timestep_sampling": "logit_normal"}),
    "diffusion.importance": Row("weight", probes.refitted, {"diffusion.importance": "density"}),
    "diffusion.importance_density": Row("loss", probes.refitted, {"diffusion.importance": "density"}),
    "diffusion.num_levels": Row(20, probes.refitted, {"diffusion.importance": "density"}),
    "diffusion.refit_from_step": Row(5, probes.refitted, {"diffusion.importance": "density"}),
    "diffusion.refit_every_steps": Row(7, probes.refitted, {"diffusion.importance": "density"}),
    "diffusion.condition_dropout": Row(0.9, probes.pairs),
    "diffusion.perceptual_weight": Row(0.3, probes.pairs, VGG),
    "diffusion.gram_weight": Row(1e6, probes.pairs, VGG),
    "diffusion.perceptual_min_snr": Row(1e-4, probes.pairs, VGG),
    "diffusion.vgg_path": Row("{other_vgg}", probes.pairs, VGG),
    "diffusion.vae_path": Row("{other_vae}", probes.pairs, {**VGG, **LATENTS, "diffusion.vae_path": "{vae}"}),
    "sampling.solver": Row("unipc", probes.images),
    "sampling.steps": Row(5, probes.images),
    "sampling.timestep_spacing": Row("karras", probes.images),
    "sampling.flow_shift": Row(3.0, probes.images),
    "sampling.guidance": Row(4.0, probes.images),
    "sampling.guidance_interval": Row([0.2, 0.6], probes.images),
    "sampling.guidance_rescale": Row(0.7, probes.images),
    "sampling.eta": Row(1.0, probes.images),
    "sampling.dynamic_steps": Row("spectrum", probes.images),
    "sampling.text_guard": Row("tests.sampling.networks:sees_text", probes.images, {"sampling.dynamic_steps": "seed"}),
    "sampling.cache_threshold": Row(0.5, probes.cached_images),
    "sampling.clip_x0": Row(True, probes.images),
    "data.name": Row("image_folder", probes.data, {**FOLDER, "data.name": "ids"}),
    "data.path": Row("{other}", probes.data, FOLDER),
    "data.grouping": Row("category", probes.emoji, EMOJI),
    "data.classes": Row(["dog", "cat"], probes.data, FOLDER),
    "data.balanced": Row(True, probes.data, FOLDER),
    # Under seed 2 the first and the last sample of the first step are mirrored, under seed 0 none is.
    "data.flip": Row(True, probes.first_step, {**FOLDER, "train.seed": 2}),
    "data.random_crop": Row(0.3, probes.first_step, FOLDER),
    "data.hsv_jitter": Row([0.1, 0.5, 0.5], probes.first_step, FOLDER),
    "data.num_samples": Row(10, probes.first_step),
    "data.prefetch_batches": Row(0, probes.first_step),
    "train.steps": Row(10, probes.rates),
    "train.stop_at_step": Row(3, probes.run, SHORT),
    "train.global_batch_size": Row(8, probes.first_step),
    "train.micro_batch_size": Row(2, probes.first_step),
    "train.gradient_accumulation_steps": Row(4, probes.first_step),
    "train.precision": Row("bf16", probes.deepspeed, {"parallel.zero_stage": 1}),
    "train.activation_checkpointing": Row("selective", probes.stage),
    "train.activation_checkpoint_every_blocks": Row(3, probes.stage, {"train.activation_checkpointing": "full"}),
    "train.attention_backend": Row("math", probes.stage),
    "train.compile": Row(True, probes.stage),
    "train.kernels": Row("off", probes.operators),
    "train.progressive": Row(True, probes.sizes, {"model.input_size": 8}),
    "train.stages": Row(
        [{"until": 1.0, "input_size": 4}], probes.sizes, {"model.input_size": 8, "train.progressive": True}
    ),
    "train.norm_backend": Row("apex", probes.stage, {"model.qk_norm": True}),
    "optimizer.name": Row("sgd", probes.updates),
    "optimizer.lr": Row(1e-3, probes.rates),
    "optimizer.betas": Row([0.5, 0.6], probes.updates),
    "optimizer.eps": Row(1e-2, probes.updates),
    "optimizer.weight_decay": Row(0.5, probes.updates),
    "optimizer.momentum": Row(0.5, probes.updates, SGD),
    "optimizer.clip_norm": Row(0.5, probes.deepspeed, {"parallel.zero_stage": 1}),
    "optimizer.clip_every_steps": Row(
        2, probes.trained, {**SHORT, "optimizer.clip_norm": 1e-3, "optimizer.name": "sgd"}
    ),
    "optimizer.final_fraction": Row(0.5, probes.rates),
    "optimizer.final_lr_ratio": Row(0.5, probes.rates, {"optimizer.final_fraction": 0.5}),
    "optimizer.path_lr_ratios": Row([1.0, 0.5, 0.2], probes.path_updates, UNET),
    "optimizer.lr_schedule": Row("constant", probes.rates),
    "optimizer.warmup_steps": Row(6, probes.rates),
    "optimizer.warmup_epochs": Row(
        2.0, probes.trained, {"optimizer.warmup_steps": 100, "train.steps": 120, "train.stop_at_step": 3}
    ),
    "optimizer.min_lr_ratio": Row(0.5, probes.rates),
    "ema.enabled": Row(False, probes.run, SHORT),
    "ema.decay": Row(0.5, probes.decays),
    "ema.warmup": Row(False, probes.decays),
    "parallel.tensor_model_parallel_size": Row(2, probes.layout),
    "parallel.pipeline_model_parallel_size": Row(2, probes.layout),
    "parallel.sequence_parallel": Row(True, probes.stage, {"parallel.tensor_model_parallel_size": 2}),
    "parallel.pipeline_schedule": Row("folded", probes.stages, {"parallel.pipeline_model_parallel_size": 2}),
    "parallel.partition": Row([1, 5], probes.stages, {"parallel.pipeline_model_parallel_size": 2}),
    "parallel.zero_stage": Row(2, probes.layout),
    "parallel.timeout_seconds": Row(77, probes.timeout),
    "checkpoint.save_every_steps": Row(1, probes.run, SHORT),
    "checkpoint.keep_last": Row(1, probes.run, {**SHORT, "checkpoint.save_every_steps": 1}),
    "monitor.log_every_steps": Row(1, probes.run, SHORT),
    "monitor.sample_every_steps": Row(0, probes.run, SHORT),
    "monitor.samples_per_class": Row(2, probes.run, SHORT),
    "monitor.tensorboard": Row(False, probes.run, SHORT),
    "monitor.evaluate_every_steps": Row(1, probes.quality, JUDGED),
    "monitor.evaluate_images": Row(9, probes.quality, JUDGED),
    "monitor.evaluate_features": Row("{other_vision}", probes.quality, JUDGED),
    "monitor.evaluate_weights": Row(
        "{other_inception}",
        probes.feature_space,
        {**JUDGED, "monitor.evaluate_features": "inception", "monitor.evaluate_weights": "{inception}"},
    ),
}


# Settings whose values name what the fixture `folders` has made.
PATHS = (
    "data.path",
    "diffusion.vgg_path",
    "diffusion.vae_path",
    "monitor.evaluate_features",
    "monitor.evaluate_weights",
)
# What one row with the tiny network cannot show has a test of its own below.
OTHERS = {"model.preset", "optimizer.preset", "train.seed"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two image folders with the same classes; pictures that differ from their mirror image."""
    made = {}
    for name, count in (("folder", 3), ("other", 4)):
        root = tmp_path_factory.mktemp(name)
        for label, number in (("cat", count), ("dog", 2)):
            (root / label).mkdir()
            for index in range(number):
                picture = Image.linear_gradient("L").resize((8, 8)).rotate(90).convert("RGB")
                picture.point(lambda level, index=index: level // (index + 1)).save(root / label / f"{index}.png")
        made[name] = str(root)
    files = tmp_path_factory.mktemp("weights")
    for seed, prefix in enumerate(("", "other_")):
        made[f"{prefix}vgg"] = str(save_vgg(files / f"{prefix}vgg.pth", seed))
        made[f"{prefix}vae"] = str(save_vae(files / f"{prefix}vae", seed))
        made[f"{prefix}vision"] = str(save_vision(files / f"{prefix}vision", seed))
        made[f"{prefix}inception"] = str(save_inception(files / f"{prefix}inception.safetensors", seed=seed))
    return made


def settings(row: Row, changes: Mapping[str, Any], folders: Mapping[str, str]) -> Config:
    """The config of a row, loaded as a user's would be."""
    values = {**copy.deepcopy(TINY), **row.base, **changes}
    for key in PATHS:
        if values.get(key) is not None:
            values[key] = values[key].format(**folders)
    return load_config(None, values)


def outcome(row: Row, changes: Mapping[str, Any], folders: Mapping[str, str], bench: Bench) -> Any:
    """What the probe sees, or the refusal."""
    try:
        return plain(row.probe(settings(row, changes, folders), bench))
    except MegadiffError as error:
        return f"{type(error).__name__}: {error}"


def test_b34_every_setting_has_a_row() -> None:
    assert ROWS.keys() | OTHERS == FIELDS.keys()


@pytest.mark.parametrize("key", ROWS)
def test_b34_a_value_other_than_the_default_has_an_effect(
    pools: Mapping[int, WorkerPool], tmp_path: Path, folders: dict[str, str], key: str
) -> None:
    row = ROWS[key]
    before = settings(row, {}, folders)
    section, _, name = key.partition(".")
    value = tuple(row.value) if isinstance(row.value, list) else row.value
    assert getattr(getattr(before, section), name) != value, "the row changes nothing"
    plainly = outcome(row, {}, folders, Bench(pools[1], tmp_path / "plain"))
    changed = outcome(row, {key: row.value}, folders, Bench(pools[1], tmp_path / "changed"))
    assert not isinstance(plainly, str), plainly
    assert changed != plainly, f"{key} = {row.value} changes nothing"
    if isinstance(changed, str):
        assert key in changed or name in changed or str(row.value) in changed, changed


def test_b34_a_grouping_beside_classes_is_refused() -> None:
    """An entry of `data.classes` names sub-groups and categories alike, so the grouping would not be read."""
    classes = {"data.name": "emoji", "data.classes": ["clothing"], "model.num_classes": 1}
    with pytest.raises(ConfigError, match=r"data\.grouping = category has no effect with data\.classes"):
        load_config(None, {**classes, "data.grouping": "category"})
    load_config(None, classes)


def test_b34_the_preset_fills_in_the_sizes() -> None:
    tiny, small = (
        load_config(None, {"data.name": "ids", "model.preset": name}) for name in ("dit-tiny-test", "dit-small-cpu")
    )
    assert tiny.model.hidden_size == 32 and small.model.hidden_size == 128


def test_b34_the_seed_changes_weights_noise_and_order(folders: dict[str, str], tmp_path: Path) -> None:
    for probe in (probes.start, probes.pairs, probes.first_step):
        row = Row(1, probe)
        zero, one = (
            plain(probe(settings(row, {"train.seed": seed}, folders), Bench(None, tmp_path))) for seed in (0, 1)
        )
        assert zero != one, probe.__name__


@pytest.mark.parametrize(("long_skips", "automatic"), [(False, "1f1b"), (True, "folded")])
def test_b34_the_automatic_schedule_is_one_of_the_others(long_skips: bool, automatic: str, tmp_path: Path) -> None:
    base = {**TINY, "model.long_skips": long_skips, "parallel.pipeline_model_parallel_size": 2}
    found = {}
    for schedule in typing.get_args(FIELDS["parallel.pipeline_schedule"].annotation):
        config = load_config(None, {**base, "parallel.pipeline_schedule": schedule})
        found[schedule] = probes.stages(config, Bench(None, tmp_path))
    assert found["auto"] == found[automatic]
    assert found["1f1b"] != found["folded"]


def test_b34_deepspeed_keys_reach_deepspeed() -> None:
    keys = {"parallel.zero_stage": 2, "deepspeed.zero_optimization.reduce_bucket_size": 1234}
    config = load_config(None, {**TINY, **keys})
    told = build_deepspeed_config(config, resolve_layout(config, 1))
    assert told["zero_optimization"]["reduce_bucket_size"] == 1234
