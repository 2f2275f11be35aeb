"""B38: a UNet with groups of any size computes with kernels what it computes without them."""

import pytest
import torch

from megadiff.config.presets import preset_values
from megadiff.config.schema import ModelConfig
from megadiff.models import build_network
from megadiff.models.chain import Chain
from megadiff.ops.backends import Backends
from tests.parity.networks import random_value

EPS = torch.finfo(torch.float32).eps
# Channels a group: 1 and 2, 3 and 6, 5 and 12, 33 and 3 (beside those of joined skips).
WIDTHS = {(8, 16): 8, (24, 48): 8, (20, 48): 4, (132, 12): 4}


def network(model: ModelConfig, kernels: str, dtype: torch.dtype) -> Chain:
    chain = build_network(model, 0, backends=Backends("auto", kernels, "torch"))
    for name, parameter in chain.named_parameters():
        parameter.data = random_value(name, parameter.shape, dtype)
    return chain


@pytest.mark.parametrize("side", [4, 14, 64])
@pytest.mark.parametrize("widths", WIDTHS)
def test_b38_kernels_and_plain_pytorch_agree(widths: tuple[int, int], side: int) -> None:
    """The error of either is measured against float64; the kernels' is at most twice the other's."""
    values = {**preset_values("unet-tiny-test"), "block_out_channels": widths, "norm_num_groups": WIDTHS[widths]}
    model = ModelConfig(**{**values, "attention_head_dim": 4, "input_size": side})
    errors = {}
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(side))
    state = images, torch.tensor([3, 800]), torch.tensor([1, 2])
    exact = _gradients(network(model, "off", torch.float64), state)
    # What is added to all keys, or to a group of one channel, changes nothing: such gradients are rounding alone.
    least = 1e-3 * max(value.norm() for value in exact.values())
    size = {name: value.norm().clamp(min=least) for name, value in exact.items()}
    for kernels in ("required", "off"):
        found = _gradients(network(model, kernels, torch.float32), state)
        errors[kernels] = {name: float((found[name] - exact[name]).norm() / size[name]) for name in exact}
    for name in exact:
        assert errors["required"][name] <= 2 * errors["off"][name] + 100 * EPS, name


def _gradients(chain: Chain, state: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    output = chain(state)
    output.square().sum().backward()
    gradients = {name: parameter.grad.double() for name, parameter in chain.named_parameters()}
    return {"output": output.detach().double()} | gradients
