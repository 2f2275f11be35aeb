"""The smallest case of every operator, with gradients: what the thread sanitizer has the time for."""

import pytest
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


def test_tiny_group_norm_silu(operators: Namespace) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = random("x", (1, 6, 5, 3)).to(memory_format=layout).requires_grad_()
        weight, bias = random("weight", (6,)).requires_grad_(), random("bias", (6,)).requires_grad_()
        backward(operators.group_norm_silu(x, weight, bias, None, None, None, 2, 1e-5, True)[0])
        assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_tiny_group_norm_silu_in_two_passes(operators: Namespace, channels_last: bool) -> None:
    """The CUDA kernels keep a group of up to 32 KiB in shared memory; this one has 33."""
    x = random("x", (1, 8, 33, 32))
    x = (x.contiguous(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
    vectors = [random(name, (8,)).requires_grad_() for name in ("weight", "bias")]
    rows = [random(name, (1, 8)).requires_grad_() for name in ("offset", "scale", "shift")]
    backward(operators.group_norm_silu(x, *vectors, *rows, 1, 1e-5, True)[0])
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in (x, *vectors, *rows))


def test_tiny_diffuse_and_solver_step(operators: Namespace) -> None:
    x0, ids = random("x0", (2, 3, 5)), torch.arange(2)
    x_t, target = operators.diffuse(x0, torch.ones(2, 4), ids, 1, 0, 2, 0)
    both = torch.cat((x_t, target))
    state = operators.solver_step(both, x0, x0, x0, x0, x0, [0.5, 0.5], 1.0, [0.2] * 5, [0.25] * 4, 2.0, True)
    assert all(value.isfinite().all() for value in state)


def test_tiny_adamw_ema(operators: Namespace) -> None:
    shards = [random(name, (37,)) for name in ("param", "grad", "avg")] + [torch.zeros(37), torch.zeros(37)]
    operators.adamw_ema_(*shards, torch.zeros(37, dtype=torch.bfloat16), 1e-3, 0.9, 0.99, 1e-8, 0.1, 1, 0.1, 1.0)
    assert all(value.isfinite().all() for value in shards)
