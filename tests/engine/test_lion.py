"""Lion against the algorithm of its paper, element by element in plain floats."""

import math
from collections.abc import Callable

import pytest
import torch

from megadiff.engine.adamw_ema import AdamWEma
from megadiff.engine.group_optimizer import GroupOptimizer
from megadiff.engine.lion import Lion

RATE, DECAY, BETAS = 0.01, 0.3, (0.9, 0.99)


def by_hand(weight: float, grads: list[float]) -> tuple[float, float]:
    """Weight and momentum after all steps."""
    momentum = 0.0
    for grad in grads:
        mixed = BETAS[0] * momentum + (1 - BETAS[0]) * grad
        weight -= RATE * ((math.copysign(1.0, mixed) if mixed else 0.0) + DECAY * weight)
        momentum = BETAS[1] * momentum + (1 - BETAS[1]) * grad
    return weight, momentum


def test_c5_every_element_follows_the_algorithm() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, generator=generator, dtype=torch.float64)
    grads = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    grads[:, 2] = 0.0
    weight, bias = torch.nn.Parameter(start[:4].clone()), torch.nn.Parameter(start[4:].clone())
    optimizer = Lion([{"params": [weight, bias], "weight_decay": DECAY}], BETAS)
    optimizer.param_groups[0]["lr"] = RATE
    for row in grads:
        weight.grad, bias.grad = row[:4].clone(), row[4:].clone()
        optimizer.step()
    found = torch.cat([weight, bias]).tolist()
    momenta = torch.cat([optimizer.state[weight]["exp_avg"], optimizer.state[bias]["exp_avg"]]).tolist()
    for index in range(6):
        expected = by_hand(float(start[index]), grads[:, index].tolist())
        assert (found[index], momenta[index]) == pytest.approx(expected, rel=1e-12)


def test_a_parameter_without_gradient_stays() -> None:
    still = torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([still], BETAS)
    optimizer.param_groups[0]["lr"] = RATE
    optimizer.step()
    assert still.tolist() == [1.0, 1.0] and not optimizer.state[still]


@pytest.mark.parametrize("kind", [Lion, lambda params, betas: AdamWEma(params, betas, 1e-8, "off")])
def test_a_closure_is_refused(kind: Callable[..., GroupOptimizer]) -> None:
    with pytest.raises(TypeError, match="closure"):
        kind([torch.nn.Parameter(torch.ones(1))], BETAS).step(lambda: 0.0)
