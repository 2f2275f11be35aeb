"""Probes: each builds a real part of a run from a config and describes it as values that can be compared."""

import contextlib
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from launch import pretrain
from megadiff.checkpoint import CheckpointReader
from megadiff.config.deepspeed_json import build_deepspeed_config
from megadiff.config.layout import resolve_layout
from megadiff.config.load import to_yaml
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
from megadiff.engine.quality import open_run_space
from megadiff.models import build_network
from megadiff.models.feature_cache import HitRate
from megadiff.models.sizes import text_size
from megadiff.parallel.forward import open_predict
from megadiff.parallel.stage import DTYPES, Stage, build_stage, stage_layers
from megadiff.sampling.generate import ImageRequest, generate
from tests.engine.runs import checkpoints, log_steps, train_well
from tests.models.networks import random_network
from tests.parity.jobs import this_process
from tests.parity.networks import random_value, seeded
from tests.pool import WorkerPool


@dataclass(frozen=True)
class Bench:
    """What probes may use: the pool of one process and a fresh folder."""

    pool: WorkerPool
    path: Path


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


def cached_images(config: Config, bench: Bench) -> Any:
    """Samples of a network with random weights, as a run's network makes them."""
    network = random_network(config.model, torch.float32)
    stage, grid = Stage(network, mock.Mock()), mock.Mock(**{"pipe.degree": 1})
    opened = partial(open_predict, stage, grid, config.model, config.sampling.cache_threshold, HitRate())
    request = ImageRequest([0, 1], [0, 1], seed=0)
    return generate(request, config, opened, torch.device("cpu"), 0, 1, lambda part: part)


def images(config: Config, bench: Bench) -> Any:
    """Samples of a made-up network."""

    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        return 2 * x_t + labels.view(-1, 1, 1, 1)

    request = ImageRequest([0, 1], [0, 1], seed=0)
    return generate(request, config, lambda: predict, torch.device("cpu"), 0, 1, lambda part: part)


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


def quality(config: Config, bench: Bench) -> Any:
    """The figures that a whole run leaves."""
    train_well(bench.pool, config, bench.path)
    return (bench.path / "quality.jsonl").read_text().splitlines()


def feature_space(config: Config, bench: Bench) -> Any:
    """In which space the figures of a run would be."""
    return bench.pool.run(_fingerprint_of_space, config=config, cache=bench.path)


def _fingerprint_of_space(config: Config, cache: Path) -> str:
    space = open_run_space(config, cache, this_process())
    assert space is not None
    return space.fingerprint


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
