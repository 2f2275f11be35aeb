"""Training on one process in plain PyTorch, without DeepSpeed, engine and kernels: what every layout must equal."""

import copy
import math

import torch
from torch import Tensor

from megadiff.config.layout import resolve_layout
from megadiff.config.schema import Config
from megadiff.engine.build import make_objective
from megadiff.engine.ema import ema_decay
from megadiff.engine.optimizer import learning_rate, make_optimizer
from megadiff.models import build_network
from megadiff.models.chain import Chain
from megadiff.ops.backends import Backends
from tests.parity.networks import global_batch, micro_batches, probe, random_value
from tests.parity.outcome import Outcome


def reference_network(config: Config) -> Chain:
    """The whole network with the values of the parity tests."""
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    network = build_network(config.model, 0, dtype, Backends(kernels="off"))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(random_value(name, parameter.shape, dtype))
    return network


def train_reference(config: Config, num_steps: int) -> Outcome:
    """Trains with gradient accumulation, AdamW or SGD, clipping, schedule and moving average."""
    layout = resolve_layout(config, 1)
    config = config.model_copy(update={"train": config.train.model_copy(update={"kernels": "off"})})
    network, objective = reference_network(config), make_objective(config)
    optimizer = make_optimizer(config.optimizer, network)
    average = copy.deepcopy(network)
    losses, norms, rates = [], [], []
    gradients: dict[str, Tensor] = {}
    for step in range(num_steps):
        batch = global_batch(config.model, step)
        optimizer.zero_grad()
        total = 0.0
        for micro in micro_batches(batch, layout, 0):
            images = micro.images.double() if config.train.precision == "fp64" else micro.images
            inputs = objective.prepare(images, micro.labels, micro.sample_ids, step)
            output = network((inputs.x_t, inputs.t, inputs.labels))
            per_sample = objective.losses(output, inputs.target, inputs.weight, pictures=inputs.pictures)
            loss = per_sample.sum() / batch.images.numel()
            loss.backward()
            total += loss.item()
        clips = (step + 1) % config.optimizer.clip_every_steps == 0
        limit = config.optimizer.clip_norm if clips else math.inf
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), limit)
        rates.append(learning_rate(step, config.train.steps, config.optimizer))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1] * group["lr_ratio"]
        gradients = gradients or {name: p.grad.clone() for name, p in network.named_parameters()}
        optimizer.step()
        update_average(average, network, ema_decay(step, config.ema))
        losses.append(total)
        norms.append(norm.item())
    return Outcome(
        losses=losses,
        norms=norms,
        rates=rates,
        gradients=gradients,
        weights={name: p.detach() for name, p in network.named_parameters()},
        averages={name: p.detach() for name, p in average.named_parameters()},
        prediction=predict_reference(network, config),
        averaged_prediction=predict_reference(average, config),
    )


@torch.no_grad()
def update_average(average: Chain, network: Chain, decay: float) -> None:
    """average = decay average + (1 - decay) weights."""
    for mean, parameter in zip(average.parameters(), network.parameters(), strict=True):
        mean.mul_(decay).add_(parameter, alpha=1 - decay)


@torch.no_grad()
def predict_reference(network: Chain, config: Config) -> Tensor:
    """The network's answer to the probe."""
    return network(probe(config))
