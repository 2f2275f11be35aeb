"""The peer of a training step: diffusers' network of the same size, trained by a plain PyTorch loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from diffusers import DiTTransformer2DModel, UNet2DModel
from torch import Tensor, nn

from megadiff.config.schema import Config, ModelConfig
from megadiff.diffusion.prediction import target
from megadiff.diffusion.schedule import make_schedule

Step = Callable[[Tensor, Tensor, int], None]


def peer_network(model: ModelConfig) -> nn.Module:
    """diffusers' network of the same shape, in the layout and on the backends that it has by default."""
    return {"dit": _dit, "unet": _unet}[model.name](model)


def _dit(model: ModelConfig) -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=model.num_heads,
        attention_head_dim=model.hidden_size // model.num_heads,
        in_channels=model.in_channels,
        out_channels=model.in_channels,
        num_layers=model.num_layers,
        sample_size=model.input_size,
        patch_size=model.patch_size,
        num_embeds_ada_norm=model.num_classes,
    )


def _unet(model: ModelConfig) -> nn.Module:
    attends = ["Attn" if depth else "" for depth in model.transformer_layers_per_block]
    return UNet2DModel(
        sample_size=model.input_size,
        in_channels=model.in_channels,
        out_channels=model.in_channels,
        freq_shift=model.time_freq_shift,
        block_out_channels=model.block_out_channels,
        down_block_types=tuple(f"{attention}DownBlock2D" for attention in attends),
        up_block_types=tuple(f"{attention}UpBlock2D" for attention in reversed(attends)),
        layers_per_block=model.layers_per_block,
        add_attention=model.mid_block_transformer_layers > 0,
        attention_head_dim=model.attention_head_dim,
        norm_num_groups=model.norm_num_groups,
        norm_eps=model.norm_eps,
        resnet_time_scale_shift="scale_shift" if model.resnet_time_scale_shift else "default",
        dropout=model.dropout,
        num_class_embeds=model.num_classes + 1,  # as ours: the last one is no class
    )


def peer_step(config: Config, network: nn.Module) -> Step:
    """One step of the plain loop with the same schedule, prediction, clipping and optimizer."""
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0
    )
    schedule = make_schedule(config.diffusion.schedule, config.diffusion.num_train_timesteps)

    def step(images: Tensor, labels: Tensor, position: int) -> None:
        t = torch.randint(config.diffusion.num_train_timesteps, labels.shape)
        noise = torch.randn_like(images)
        alpha, sigma = schedule.at(t, images)
        output = network(alpha * images + sigma * noise, timestep=t, class_labels=labels).sample
        wanted = target(config.diffusion.prediction, images, noise, alpha, sigma)
        torch.nn.functional.mse_loss(output, wanted).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


class SavedBytes:
    """What autograd saved for the backward pass: every storage once, those of `network` left out."""

    def __init__(self, network: nn.Module) -> None:
        self._outside = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
        self._saved: dict[int, Tensor] = {}

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._saved.values())

    def note(self, tensor: Tensor) -> Tensor:
        """Keeps a tensor, so that no later one takes its address."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._outside:
            self._saved[address] = tensor
        return tensor


@contextmanager
def saved_bytes(network: nn.Module) -> Iterator[SavedBytes]:
    """Counts what forward passes inside save for the backward pass."""
    saved = SavedBytes(network)
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved
