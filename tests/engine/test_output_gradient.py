"""Per-sample gradient norms of the output layer against autograd, one sample at a time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megadiff.config.schema import ModelConfig
from megadiff.engine.output_gradient import OutputGradient, squared_norms
from megadiff.models.chain import Chain
from tests.parity.networks import DIT, UNET, seeded

LAYERS: dict[str, tuple[Callable[[], nn.Linear | nn.Conv2d], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (3, 7, 5)),
    "conv 3x3": (lambda: nn.Conv2d(5, 4, 3, padding=1), (3, 5, 6, 4)),
    "conv 1x3": (lambda: nn.Conv2d(5, 4, (1, 3), padding=(0, 1)), (3, 5, 2, 4)),
}


def one_by_one(layer: nn.Module, inputs: Tensor, loss: Callable[[Tensor], Tensor]) -> list[float]:
    found = []
    for row in inputs.split(1):
        grads = torch.autograd.grad(loss(layer(row)), list(layer.parameters()))
        found.append(sum(float(grad.square().sum()) for grad in grads))
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_norms_of_a_layer(name: str) -> None:
    make, shape = LAYERS[name]
    layer, inputs = make().double(), torch.randn(shape, generator=seeded(name), dtype=torch.float64)
    output = layer(inputs)
    (grads,) = torch.autograd.grad(output.sin().sum(), output)
    assert squared_norms(layer, inputs, grads).tolist() == pytest.approx(
        one_by_one(layer, inputs, lambda answer: answer.sin().sum()), rel=1e-12
    )


def chain_of(model: ModelConfig) -> Chain:
    from megadiff.models import build_network

    chain = build_network(model, 0, torch.float64)
    for name, parameter in chain.named_parameters():
        parameter.data.normal_(std=0.2, generator=seeded(name))
    return chain


@pytest.mark.parametrize("model", [DIT, UNET], ids=["DiT", "UNet"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_norms_of_a_network_whatever_the_loss_is_scaled_with(model: ModelConfig, recompute: str) -> None:
    """Two micro-batches whose losses are scaled as DeepSpeed and mixed precision do, all backward at the end."""
    chain = chain_of(model)
    chain.set_recompute(recompute)
    gradient, head = OutputGradient(chain), chain.layer("head")
    shape = (2, model.in_channels, model.input_size, model.input_size)
    expected, scaled = [], []
    for part, scale in enumerate((0.25, 4096.0)):
        x_t = torch.randn(shape, generator=seeded(f"x{part}"), dtype=torch.float64)
        target = torch.randn(shape, generator=seeded(f"y{part}"), dtype=torch.float64)
        t, labels = torch.tensor([10, 500]), torch.tensor([0, 1])
        losses = (chain((x_t, t, labels))[:, : shape[1]] - target).square().flatten(1).sum(1)
        gradient.watch(losses)
        scaled.append((losses * torch.tensor([1.0, 1.0])).sum() * scale)
        for row in range(2):
            rows = slice(row, row + 1)
            own = (chain((x_t[rows], t[rows], labels[rows]))[:, : shape[1]] - target[rows]).square().sum()
            grads = torch.autograd.grad(
                own, [p for name, p in head.named_parameters() if name.startswith(("out", "conv"))]
            )
            expected.append(sum(float(grad.square().sum()) for grad in grads))
    for loss in scaled:
        loss.backward()
    assert gradient.take().tolist() == pytest.approx(expected, rel=1e-9)
    assert gradient.take() is None


def test_a_forward_pass_without_gradients_is_not_watched() -> None:
    chain = chain_of(DIT)
    gradient = OutputGradient(chain)
    with torch.no_grad():
        x_t = torch.zeros(1, DIT.in_channels, DIT.input_size, DIT.input_size, dtype=torch.float64)
        chain((x_t, torch.tensor([0]), torch.tensor([0])))
    assert gradient._latest is None and gradient.take() is None
