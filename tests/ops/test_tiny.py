"""The smallest case of every operator, with gradients: what the thread sanitizer has the time for."""

import torch

from tests.ops.cases import random

Namespace = torch._ops._OpNamespace


def backward(output: torch.Tensor) -> None:
    """Runs the gradient; the values are tested elsewhere."""
    output.float().square().sum().backward()


def test_tiny_ada_layer_norm(operators: Namespace) -> None:
    x, shift, scale = (
        random(name, shape).requires_grad_()
        for name, shape in (("x", (1, 17, 12)), ("shift", (1, 12)), ("scale", (1, 12)))
    )
    y = operators.ada_layer_norm(x, shift, scale, 1e-6)[0]
    backward(operators.gated_residual(x, y, scale))
    assert x.grad is not None and x.grad.isfinite().all()


def test_tiny_weighted_mse(operators: Namespace) -> None:
    output, target = random("output", (2, 2, 5, 7)).requires_grad_(), random("target", (2, 2, 5, 7))
    backward(operators.weighted_mse(output, target, torch.ones(2), random("mask", (2, 1, 5, 7)) > 0))
    assert output.grad is not None and output.grad.isfinite().all()
