"""AdamW and moving average: both kernels against torch's optimizer in float64, odd lengths, bad input."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megadiff.ops.adamw_ema import adamw_ema_
from tests.ops.cases import error, random

Namespace = torch._ops._OpNamespace
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
NAMES = ("param", "exp_avg", "exp_avg_sq", "ema")


def state(numel: int, start: int = 0) -> dict[str, Tensor]:
    """Shards inside larger buffers, so that they begin where nothing is aligned."""
    values = {name: torch.zeros(numel + start) for name in NAMES}
    values["param"] += random("param", (numel + start,))
    values["ema"] += values["param"]
    return {name: value[start:] for name, value in values.items()}


def by_torch(dtype: torch.dtype, initial: Tensor, grads: list[Tensor], decay: float, scale: float) -> dict[str, Tensor]:
    """torch.optim.AdamW and a lerp."""
    param = torch.nn.Parameter(initial.to(dtype))
    ema = param.detach().clone()
    optimizer = torch.optim.AdamW([param], **SETTINGS)
    for grad in grads:
        param.grad = grad.to(dtype) * scale
        optimizer.step()
        ema.lerp_(param.detach(), 1 - decay)
    moments = optimizer.state[param]
    return {"param": param.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"], "ema": ema}


def step_op(operators: Namespace, values: dict[str, Tensor], grad: Tensor, step: int, **more: Any) -> None:
    ema = values["ema"] if more.get("with_ema", True) else None
    moments = values["exp_avg"], values["exp_avg_sq"]
    rates = SETTINGS["lr"], *SETTINGS["betas"], SETTINGS["eps"], SETTINGS["weight_decay"]
    operators.adamw_ema_(
        values["param"], grad, *moments, ema, more.get("low"), *rates, step, 1 - 0.9, more.get("scale", 1.0)
    )


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize(("numel", "start"), [(1, 0), (3, 1), (64, 0), (67, 0), (1000, 3), (4096, 0)])
def test_steps_are_those_of_adamw(operators: Namespace, numel: int, start: int, scale: float) -> None:
    values, grads = state(numel, start), [random(f"grad {step}", (numel,)) for step in range(5)]
    initial = values["param"].clone()
    for step, grad in enumerate(grads, 1):
        step_op(operators, values, grad, step, scale=scale)
    eager, truth = (by_torch(dtype, initial, grads, 0.9, scale) for dtype in (torch.float32, torch.float64))
    for name in NAMES:
        allowed = (
            2 * error(eager[name], truth[name]) + 4 * torch.finfo(torch.float32).eps * truth[name].abs().max().item()
        )
        assert error(values[name], truth[name]) <= allowed, name


@pytest.mark.parametrize("low_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [5, 64])
def test_the_low_precision_copy_is_the_rounded_weight(operators: Namespace, numel: int, low_dtype: torch.dtype) -> None:
    values, low = state(numel), torch.zeros(numel, dtype=low_dtype)
    step_op(operators, values, random("grad", (numel,)), 1, low=low)
    assert torch.equal(low, values["param"].to(low_dtype))


def test_without_an_average(operators: Namespace) -> None:
    with_one, without = state(33), state(33)
    before = without["ema"].clone()
    for values, flag in ((with_one, True), (without, False)):
        step_op(operators, values, random("grad", (33,)), 1, with_ema=flag)
    assert torch.equal(with_one["param"], without["param"])
    assert torch.equal(without["ema"], before) and not torch.equal(with_one["ema"], before)


def test_empty_and_opcheck(operators: Namespace) -> None:
    step_op(operators, state(0), torch.zeros(0), 1)
    values = state(9)
    numbers = (1e-2, 0.9, 0.99, 1e-8, 0.1, 1, 0.1, 1.0)
    shards = (values["param"], random("grad", (9,)), values["exp_avg"], values["exp_avg_sq"], values["ema"])
    torch.library.opcheck(operators.adamw_ema_.default, (*shards, torch.zeros(9, dtype=torch.bfloat16), *numbers))
    torch.library.opcheck(operators.adamw_ema_.default, (*shards[:4], None, None, *numbers))


def test_bad_input_is_refused(operators: Namespace) -> None:
    values, grad = state(8), random("grad", (8,))
    with pytest.raises(RuntimeError, match="adamw_ema_: grad: expected float32, got bfloat16"):
        step_op(operators, values, grad.bfloat16(), 1)
    with pytest.raises(RuntimeError, match=r"adamw_ema_: grad: expected shape \(8,\), got \(7,\)"):
        step_op(operators, values, grad[:7], 1)
    with pytest.raises(RuntimeError, match="adamw_ema_: step: expected at least 1, got 0"):
        step_op(operators, values, grad, 0)
    with pytest.raises(RuntimeError, match="adamw_ema_: grad: expected a contiguous tensor"):
        step_op(operators, values, random("grad", (16,))[::2], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_reference_is_adamw(dtype: torch.dtype) -> None:
    values = {name: value.to(dtype) for name, value in state(50).items()}
    grads = [random(f"grad {step}", (50,), dtype) for step in range(3)]
    expected = by_torch(dtype, values["param"].clone(), grads, 0.9, 0.5)
    for step, grad in enumerate(grads, 1):
        adamw_ema_(
            values["param"], grad, values["exp_avg"], values["exp_avg_sq"], values["ema"],
            **SETTINGS, step=step, ema_weight=1 - 0.9, grad_scale=0.5, kernels="off",
        )  # fmt: skip
    for name in NAMES:
        torch.testing.assert_close(values[name], expected[name])
