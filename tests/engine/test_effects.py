"""B34 (b): every setting changes what is built or done, or is refused; a setting without a row here fails the test.

A row says which probe looks for the effect. Each probe builds a real part of a run and describes it as plain values.
"""

import contextlib
import copy
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from launch import pretrain
from megadiff.checkpoint import CheckpointReader
from megadiff.config.deepspeed_json import build_deepspeed_config
from megadiff.config.keys import FIELDS
from megadiff.config.layout import resolve_layout
from megadiff.config.load import load_config, to_yaml
from megadiff.config.progressive import training_stages
from megadiff.config.schema import Config
from megadiff.data import open_dataset
from megadiff.data.emoji import open_emoji
from megadiff.dist import process
from megadiff.dist.grid import Axis
from megadiff.engine import trainer
from megadiff.engine.build import make_objective
from megadiff.engine.ema import ema_decay
from megadiff.engine.optimizer import learning_rate, make_optimizer, set_learning_rate
from megadiff.errors import ConfigError, MegadiffError
from megadiff.models import build_network
from megadiff.models.sizes import text_size
from megadiff.parallel.stage import DTYPES, build_stage, stage_layers
from megadiff.sampling.generate import ImageRequest, generate
from tests.diffusion.weights import save_vae, save_vgg
from tests.engine.runs import checkpoints, log_steps, train_well
from tests.parity.networks import random_value, seeded
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
Probe = Callable[[Config, "Bench"], Any]


@dataclass(frozen=True)
class Bench:
    """What probes may use: the pool of one process and a fresh folder."""

    pool: WorkerPool
    path: Path


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


def network(config: Config, bench: Bench) -> Any:
    """Parameters' shapes and the answer of the network, whose weights depend on their names only."""
    chain = build_network(config.model, 0)
    for name, parameter in chain.named_parameters():
        parameter.data.copy_(random_value(name, parameter.shape, torch.float32))
    chain.dropout_seeds = iter([7])
    model = config.model
    shape = (2, model.in_channels, model.input_size, model.input_size)
    x_t = torch.randn(shape, generator=seeded("effects"))
    text = torch.randn((2, text_size(model)), generator=seeded("text"))
    labels = text if text_size(model) else torch.tensor([0, model.num_classes])
    answer = chain((x_t, torch.tensor([100, 900]), labels))
    return {name: tuple(p.shape) for name, p in chain.named_parameters()}, answer


def pairs(config: Config, bench: Bench) -> Any:
    """The training pairs of a batch, and its loss for a zero answer."""
    objective = make_objective(config)
    images = torch.rand((16, 3, 4, 4), generator=seeded("images")) * 2 - 1
    inputs = objective.prepare(images, torch.zeros(16, dtype=torch.int64), torch.arange(16), 3)
    output = torch.zeros_like(inputs.target)
    loss = objective.losses(output, inputs.target, inputs.weight, pictures=inputs.pictures).sum()
    return inputs.x_t, inputs.t, inputs.labels, inputs.target, loss


def refitted(config: Config, bench: Bench) -> Any:
    """When the density and the weights of a run change, and what they are in the end."""
    objective, generator = make_objective(config), seeded("losses")
    changes = []
    for step in range(1, 13):
        t = torch.randint(config.diffusion.num_train_timesteps, (64,), generator=generator)
        losses = torch.rand(64, generator=generator, dtype=torch.float64) * t
        objective.after_step(step, t, losses, losses.square() + 1.0)
        if not changes or not torch.equal(changes[-1][1], objective.weights):
            changes.append((step, objective.weights))
    return changes, pairs(config, bench)


def start(config: Config, bench: Bench) -> Any:
    """A parameter as it is at the start."""
    return build_network(config.model, config.train.seed).get_parameter("blocks.0.attn.q.weight")


def shifts(config: Config, bench: Bench) -> Any:
    """The shifts of a skip at the start."""
    return build_network(config.model, 0).get_parameter("up.1.0.resnet.junction.shift.offsets")


def images(config: Config, bench: Bench) -> Any:
    """Samples of a made-up network."""

    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        return 2 * x_t + labels.view(-1, 1, 1, 1)

    request = ImageRequest([0, 1], [0, 1], seed=0)
    return generate(request, config, predict, torch.device("cpu"), 0, 1, lambda part: part)


def data(config: Config, bench: Bench) -> Any:
    """The data set."""
    dataset = open_dataset(config)
    return dataset.class_names, dataset.fingerprint, len(dataset)


def emoji(config: Config, bench: Bench) -> Any:
    """The classes of the embedded pictures, however many the network has."""
    return open_emoji(config.model.input_size, config.data.grouping, config.data.classes).class_names


def first_step(config: Config, bench: Bench) -> Any:
    """What the loader of a run hands to the first step, and whether a thread reads ahead."""
    engine = SimpleNamespace(
        config=config,
        layout=resolve_layout(config, 1),
        grid=SimpleNamespace(data=SimpleNamespace(index=0)),
        needs_data=True,
        samples=0,
    )
    with contextlib.closing(trainer._steps_of_data(engine, open_dataset(config))) as steps:
        batches = next(steps)
        reads_ahead = any(thread.name == "megadiff-data" for thread in threading.enumerate())
    return [(batch.indices, batch.labels, batch.images) for batch in batches], reads_ahead


def layout(config: Config, bench: Bench) -> Any:
    """How four processes are laid out."""
    return vars(resolve_layout(config, 4))


def deepspeed(config: Config, bench: Bench) -> Any:
    """What DeepSpeed is told."""
    return build_deepspeed_config(config, resolve_layout(config, 1))


def stages(config: Config, bench: Bench) -> Any:
    """Which layers each pipeline stage holds."""
    return stage_layers(config)


def stage(config: Config, bench: Bench) -> Any:
    """The layers that a rank builds: kernels, recomputation, compilation, collectives, dtype."""
    one = Axis(1, 0, (0,), None)
    degree = config.parallel.tensor_model_parallel_size
    grid = SimpleNamespace(pipe=one, data=one, tensor=Axis(degree, 0, tuple(range(degree)), None))
    chain = build_stage(config, grid, torch.device("cpu"), DTYPES["fp32"]).chain
    modules = [vars(module) for module in chain.modules()]
    return {
        "recompute": chain.recompute,
        "segments": chain.segments(),
        "backends": [(module.get("backend"), module.get("norm_backend")) for module in modules],
        "compiled": [module.get("_compiled_call_impl") is not None for module in modules],
        "sequence": [module.get("sequence") for module in modules],
        "hooks": [len(module["_forward_pre_hooks"]) + len(module["_forward_hooks"]) for module in modules],
    }


def operators(config: Config, bench: Bench) -> Any:
    """The operators of ours that a forward and backward pass calls."""
    one = Axis(1, 0, (0,), None)
    grid = SimpleNamespace(pipe=one, data=one, tensor=one)
    chain = build_stage(config, grid, torch.device("cpu"), DTYPES["fp32"]).chain
    objective = make_objective(config)
    model = config.model
    shape = (2, model.in_channels, model.input_size, model.input_size)
    with Called() as called:
        inputs = objective.prepare(torch.zeros(shape), torch.tensor([0, 1]), torch.tensor([0, 1]), 0)
        output = chain((inputs.x_t, inputs.t, inputs.labels))
        objective.losses(output, inputs.target, inputs.weight).sum().backward()
    return sorted(called.names)


class Called(TorchDispatchMode):
    """Collects the names of the operators of `torch.ops.megadiff` that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "megadiff":
            self.names.add(function.name())
        return function(*args, **(kwargs or {}))


def rates(config: Config, bench: Bench) -> Any:
    """The learning rate of every step."""
    return [learning_rate(step, config.train.steps, config.optimizer) for step in range(20)]


def updates(config: Config, bench: Bench) -> Any:
    """Some parameters after three steps with made-up gradients."""
    chain = build_network(config.model, 0)
    optimizer = make_optimizer(config.optimizer, chain)
    for _ in range(3):
        set_learning_rate(optimizer, 0.01)
        for name, parameter in chain.named_parameters():
            parameter.grad = 1e-4 * random_value("gradient of " + name, parameter.shape, torch.float32)
        optimizer.step()
    return [chain.get_parameter(name) for name in ("blocks.0.attn.q.weight", "head.out.bias")]


def path_updates(config: Config, bench: Bench) -> Any:
    """The rate of every parameter of a UNet."""
    chain = build_network(config.model, 0)
    optimizer = make_optimizer(config.optimizer, chain)
    set_learning_rate(optimizer, 0.01)
    rate = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    return {name: rate[id(parameter)] for name, parameter in chain.named_parameters()}


def decays(config: Config, bench: Bench) -> Any:
    """The moving average's decay over time."""
    return [ema_decay(step, config.ema) for step in (0, 10, 1000, 10**6)]


def run(config: Config, bench: Bench) -> Any:
    """The files and lines that a whole run leaves."""
    report = train_well(bench.pool, config, bench.path)
    kept = checkpoints(bench.path)
    with CheckpointReader(bench.path / "checkpoints" / kept[-1]) as reader:
        kinds = reader.kinds()
    pictures = {path.name: Image.open(path).size for path in sorted((bench.path / "samples").glob("*"))}
    shown = sum(line.startswith("step ") for line in report.output.splitlines())
    has_board = (bench.path / "tensorboard").exists()
    return kept, kinds, log_steps(bench.path), pictures, shown, has_board


def trained(config: Config, bench: Bench) -> Any:
    """A parameter after a whole run."""
    train_well(bench.pool, config, bench.path)
    with CheckpointReader(bench.path / "checkpoints" / checkpoints(bench.path)[-1]) as reader:
        return reader.read("model", "head.out.bias")


def sizes(config: Config, bench: Bench) -> Any:
    """At which size each step of a run trains."""
    return [(stage.first_step, stage.end_step, stage.config.model.input_size) for stage in training_stages(config)]


def timeout(config: Config, bench: Bench) -> Any:
    """How long the process group of a started run waits."""
    bench.path.mkdir(exist_ok=True)
    (bench.path / "config.yaml").write_text(to_yaml(config))
    begin = mock.patch.object(process, "start", return_value=None)
    with begin as called, mock.patch.object(process, "stop"), mock.patch.object(trainer, "train"):
        pretrain.main(["--config", str(bench.path / "config.yaml"), "--run-dir", str(bench.path / "run")])
    return called.call_args


SGD = {"optimizer.name": "sgd"}
VGG = {"diffusion.perceptual_weight": 0.5, "diffusion.gram_weight": 1.0, "diffusion.vgg_path": "{vgg}"}
LATENTS = {"data.name": "latents", "data.path": "{folder}", "data.num_samples": 1024}
ROWS: dict[str, Row] = {
    "model.name": Row("unet", network, NO_DIT),
    "model.input_size": Row(8, network),
    "model.in_channels": Row(1, network),
    "model.patch_size": Row(4, network),
    "model.hidden_size": Row(32, network),
    "model.num_layers": Row(3, network),
    "model.num_heads": Row(4, network),
    "model.mlp_ratio": Row(2.0, network),
    "model.num_classes": Row(3, network),
    "model.learn_sigma": Row(True, network),
    "model.time_freq_shift": Row(1, network),
    "model.qk_norm": Row(True, network),
    "model.dropout": Row(0.5, network),
    "model.attention_dropout": Row(0.5, network),
    "model.attention_tile_size": Row(1, network),
    "model.long_skips": Row(True, network),
    "model.position_size": Row(8, network),
    "model.condition": Row("none", network, {**UNET, "sampling.guidance": 1.0}),
    "model.block_out_channels": Row([16, 16], network, UNET),
    "model.layers_per_block": Row(2, network, UNET),
    "model.transformer_layers_per_block": Row([1, 1], network, UNET),
    "model.mid_block_transformer_layers": Row(0, network, UNET),
    "model.attention_head_dim": Row(16, network, UNET),
    "model.cross_attention_dim": Row(16, network, TEXT),
    "model.text_length": Row(7, network, TEXT),
    "model.pooled_dim": Row(8, network, TEXT),
    "model.pixel_size": Row(32, network, TEXT),
    "model.norm_num_groups": Row(4, network, UNET),
    "model.norm_eps": Row(0.1, network, UNET),
    "model.resample": Row("pool", network, UNET),
    "model.resnet_time_scale_shift": Row(True, network, UNET),
    "model.skip": Row("gated", network, UNET),
    "model.skip_shift": Row(True, network, UNET),
    "model.skip_shift_strength": Row(0.5, shifts, SHIFT),
    "diffusion.schedule": Row("linear", pairs),
    "diffusion.num_train_timesteps": Row(500, pairs),
    "diffusion.hybrid_linear_fraction": Row(0.7, pairs, {"diffusion.schedule": "hybrid"}),
    "diffusion.zero_terminal_snr": Row(True, pairs),
    "diffusion.shift": Row(2.0, pairs),
    "diffusion.shift_base_tokens": Row(64, pairs),
    "diffusion.prediction": Row("eps", pairs, {"diffusion.schedule": "linear"}),
    "diffusion.loss_weight": Row("min_snr", pairs),
    "diffusion.min_snr_gamma": Row(1.0, pairs, {"diffusion.loss_weight": "min_snr"}),
    "diffusion.timestep_sampling": Row("logit_normal", pairs),
    "diffusion.logit_normal_mean": Row(1.0, pairs, {"diffusion.timestep_sampling": "logit_normal"}),
    "diffusion.logit_normal_std": Row(0.5, pairs, {"diffusion.timestep_sampling": "logit_normal"}),
    "diffusion.importance": Row("weight", refitted, {"diffusion.importance": "density"}),
    "diffusion.importance_density": Row("loss", refitted, {"diffusion.importance": "density"}),
    "diffusion.num_levels": Row(20, refitted, {"diffusion.importance": "density"}),
    "diffusion.refit_from_step": Row(5, refitted, {"diffusion.importance": "density"}),
    "diffusion.refit_every_steps": Row(7, refitted, {"diffusion.importance": "density"}),
    "diffusion.condition_dropout": Row(0.9, pairs),
    "diffusion.perceptual_weight": Row(0.3, pairs, VGG),
    "diffusion.gram_weight": Row(1e6, pairs, VGG),
    "diffusion.perceptual_min_snr": Row(1e-4, pairs, VGG),
    "diffusion.vgg_path": Row("{other_vgg}", pairs, VGG),
    "diffusion.vae_path": Row("{other_vae}", pairs, {**VGG, **LATENTS, "diffusion.vae_path": "{vae}"}),
    "sampling.steps": Row(5, images),
    "sampling.guidance": Row(4.0, images),
    "sampling.eta": Row(1.0, images),
    "sampling.clip_x0": Row(True, images),
    "data.name": Row("image_folder", data, {**FOLDER, "data.name": "ids"}),
    "data.path": Row("{other}", data, FOLDER),
    "data.grouping": Row("category", emoji, EMOJI),
    "data.classes": Row(["dog", "cat"], data, FOLDER),
    "data.balanced": Row(True, data, FOLDER),
    # Under seed 2 the first and the last sample of the first step are mirrored, under seed 0 none is.
    "data.flip": Row(True, first_step, {**FOLDER, "train.seed": 2}),
    "data.random_crop": Row(0.3, first_step, FOLDER),
    "data.hsv_jitter": Row([0.1, 0.5, 0.5], first_step, FOLDER),
    "data.num_samples": Row(10, first_step),
    "data.prefetch_batches": Row(0, first_step),
    "train.steps": Row(10, rates),
    "train.stop_at_step": Row(3, run, SHORT),
    "train.global_batch_size": Row(8, first_step),
    "train.micro_batch_size": Row(2, first_step),
    "train.gradient_accumulation_steps": Row(4, first_step),
    "train.precision": Row("bf16", deepspeed, {"parallel.zero_stage": 1}),
    "train.activation_checkpointing": Row("selective", stage),
    "train.activation_checkpoint_every_blocks": Row(3, stage, {"train.activation_checkpointing": "full"}),
    "train.attention_backend": Row("math", stage),
    "train.compile": Row(True, stage),
    "train.kernels": Row("off", operators),
    "train.progressive": Row(True, sizes, {"model.input_size": 8}),
    "train.stages": Row([{"until": 1.0, "input_size": 4}], sizes, {"model.input_size": 8, "train.progressive": True}),
    "train.norm_backend": Row("apex", stage, {"model.qk_norm": True}),
    "optimizer.name": Row("sgd", updates),
    "optimizer.lr": Row(1e-3, rates),
    "optimizer.betas": Row([0.5, 0.6], updates),
    "optimizer.eps": Row(1e-2, updates),
    "optimizer.weight_decay": Row(0.5, updates),
    "optimizer.momentum": Row(0.5, updates, SGD),
    "optimizer.clip_norm": Row(0.5, deepspeed, {"parallel.zero_stage": 1}),
    "optimizer.clip_every_steps": Row(2, trained, {**SHORT, "optimizer.clip_norm": 1e-3, "optimizer.name": "sgd"}),
    "optimizer.final_fraction": Row(0.5, rates),
    "optimizer.final_lr_ratio": Row(0.5, rates, {"optimizer.final_fraction": 0.5}),
    "optimizer.path_lr_ratios": Row([1.0, 0.5, 0.2], path_updates, UNET),
    "optimizer.lr_schedule": Row("constant", rates),
    "optimizer.warmup_steps": Row(6, rates),
    "optimizer.min_lr_ratio": Row(0.5, rates),
    "ema.enabled": Row(False, run, SHORT),
    "ema.decay": Row(0.5, decays),
    "ema.warmup": Row(False, decays),
    "parallel.tensor_model_parallel_size": Row(2, layout),
    "parallel.pipeline_model_parallel_size": Row(2, layout),
    "parallel.sequence_parallel": Row(True, stage, {"parallel.tensor_model_parallel_size": 2}),
    "parallel.pipeline_schedule": Row("folded", stages, {"parallel.pipeline_model_parallel_size": 2}),
    "parallel.partition": Row([1, 5], stages, {"parallel.pipeline_model_parallel_size": 2}),
    "parallel.zero_stage": Row(2, layout),
    "parallel.timeout_seconds": Row(77, timeout),
    "checkpoint.save_every_steps": Row(1, run, SHORT),
    "checkpoint.keep_last": Row(1, run, {**SHORT, "checkpoint.save_every_steps": 1}),
    "monitor.log_every_steps": Row(1, run, SHORT),
    "monitor.sample_every_steps": Row(0, run, SHORT),
    "monitor.samples_per_class": Row(2, run, SHORT),
    "monitor.tensorboard": Row(False, run, SHORT),
}
# What one row with the tiny network cannot show has a test of its own below.
OTHERS = {"model.preset", "train.seed"}


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
    return made


def settings(row: Row, changes: Mapping[str, Any], folders: Mapping[str, str]) -> Config:
    """The config of a row, loaded as a user's would be."""
    values = {**copy.deepcopy(TINY), **row.base, **changes}
    for key in ("data.path", "diffusion.vgg_path", "diffusion.vae_path"):
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
    for probe in (start, pairs, first_step):
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
        found[schedule] = stages(config, Bench(None, tmp_path))
    assert found["auto"] == found[automatic]
    assert found["1f1b"] != found["folded"]


def test_b34_deepspeed_keys_reach_deepspeed() -> None:
    keys = {"parallel.zero_stage": 2, "deepspeed.zero_optimization.reduce_bucket_size": 1234}
    config = load_config(None, {**TINY, **keys})
    told = build_deepspeed_config(config, resolve_layout(config, 1))
    assert told["zero_optimization"]["reduce_bucket_size"] == 1234
