"""Runs with real networks for the conversion tests, and a DiT forward pass that shares no code with ours.

Shape letters: B samples, N tokens, D width.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.models import build_network
from tests.checkpoint.saving import save_run

TINY: Mapping[str, Any] = {
    "model.input_size": 8,
    "model.in_channels": 3,
    "model.patch_size": 2,
    "model.hidden_size": 24,
    "model.num_layers": 3,
    "model.num_heads": 4,
    "model.num_classes": 5,
    "data.name": "ids",
}


def tiny_config(**model: Any) -> Config:
    """A small config; keywords replace fields of its network."""
    return load_config(None, {**TINY, **{f"model.{key}": value for key, value in model.items()}})


def random_weights(config: Config, seed: int) -> dict[str, Tensor]:
    """Values for every parameter, none zero, so that every name matters for the output."""
    generator = torch.Generator().manual_seed(seed)
    network = build_network(config.model, 0)
    return {
        name: torch.randn(parameter.shape, generator=generator) * 0.1 for name, parameter in network.named_parameters()
    }


def random_run(run: Path, config: Config) -> Path:
    """A run folder whose raw and averaged weights differ."""
    return save_run(run, 100, {"model": random_weights(config, 1), "ema": random_weights(config, 2)}, config)


def inputs(config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images, timesteps and labels; the last label is the null class."""
    model, generator = config.model, torch.Generator().manual_seed(3)
    images = torch.randn(4, model.in_channels, model.input_size, model.input_size, generator=generator)
    return (
        images,
        torch.tensor([0, 7, 500, 999]),
        torch.tensor([0, 1, model.num_classes - 1, model.num_classes]),
    )


@torch.no_grad()
def our_output(
    config: Config, weights: Mapping[str, Tensor], state: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """What our network computes for a state, by default for `inputs`."""
    network = build_network(config.model, 0)
    network.load_state_dict(dict(weights), strict=True)
    return network.eval()(inputs(config) if state is None else state)


def dit_output(weights: Mapping[str, Tensor], num_heads: int, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """The forward pass of facebookresearch/DiT from its weights alone (arXiv 2212.09748)."""

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(value: Tensor) -> Tensor:
        centred = value - value.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    frequencies = torch.tensor([math.exp(-math.log(10000) * i / 128) for i in range(128)])
    angles = t[:, None].float() * frequencies
    time = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], -1))))
    condition = F.silu(time + weights["y_embedder.embedding_table.weight"][labels])
    patch = weights["x_embedder.proj.weight"].shape[-1]
    patches = F.unfold(x, patch, stride=patch).transpose(1, 2)  # (B, N, C p p)
    kernel = weights["x_embedder.proj.weight"].flatten(1)
    h = patches @ kernel.T + weights["x_embedder.proj.bias"] + weights["pos_embed"]
    for index in range(sum(name.endswith("attn.qkv.bias") for name in weights)):
        block = f"blocks.{index}"
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (
            part[:, None] for part in linear(f"{block}.adaLN_modulation.1", condition).chunk(6, -1)
        )
        qkv = linear(f"{block}.attn.qkv", norm(h) * (1 + scale_a) + shift_a)
        q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, N, D / heads)
        attention = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        h = h + gate_a * linear(f"{block}.attn.proj", attention.transpose(1, 2).flatten(2))
        inner = linear(f"{block}.mlp.fc1", norm(h) * (1 + scale_m) + shift_m)
        h = h + gate_m * linear(f"{block}.mlp.fc2", F.gelu(inner, approximate="tanh"))
    shift, scale = (part[:, None] for part in linear("final_layer.adaLN_modulation.1", condition).chunk(2, -1))
    out = linear("final_layer.linear", norm(h) * (1 + scale) + shift)
    side = x.shape[-1] // patch
    out = out.reshape(x.shape[0], side, side, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", out).reshape(x.shape[0], -1, side * patch, side * patch)
