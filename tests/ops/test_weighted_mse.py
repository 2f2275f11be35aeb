"""Weighted squared error: both kernels against float64, masks, the unused sigma half, bad input."""

import pytest
import torch
from torch import Tensor

from megadiff.ops.weighted_mse import reference, weighted_mse
from tests.ops.cases import KERNEL_DTYPES, assert_as_exact_as_eager, random

SHAPES = [(2, 3, 5, 7), (3, 4, 1, 1), (1, 1, 64, 64), (2, 5), (4, 2, 33)]
MASKS = ["none", "half", "nothing"]


def case(shape: tuple[int, ...], kind: str, dtype: torch.dtype, target_dtype: torch.dtype, extra: int) -> list[Tensor]:
    """Output (with `extra` more channels), target, weight and mask."""
    output = random("output", (shape[0], shape[1] + extra, *shape[2:]), dtype)
    target = random("target", shape, target_dtype)
    weight = random("weight", (shape[0],)).abs()
    mask = {"none": None, "half": random("mask", (shape[0], 1, *shape[2:])) > 0, "nothing": None}[kind]
    if kind == "nothing":
        mask = torch.zeros((shape[0], 1, *shape[2:]), dtype=torch.bool)
    return [output, target, weight, mask]


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wide_target", [True, False], ids=["float32 target", "same target"])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_loss_and_gradient_are_as_exact_as_eager(
    operators: torch._ops._OpNamespace,
    dtype: torch.dtype,
    wide_target: bool,
    shape: tuple[int, ...],
    kind: str,
    extra: int,
) -> None:
    inputs = case(shape, kind, dtype, torch.float32 if wide_target else dtype, extra)
    seeds = random("grad", (shape[0],))

    def run(function, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        output, target, weight, mask = (
            value if dtype is None or value is None or value.dtype == torch.bool else value.to(dtype)
            for value in inputs
        )
        output = output.clone().requires_grad_()
        loss = function(output, target, weight, mask)
        return loss, torch.autograd.grad((loss * seeds.to(loss.dtype)).sum(), output)[0]

    ours, eager, truth = run(operators.weighted_mse, None), run(reference, None), run(reference, torch.float64)
    for name, a, b, c in zip(("loss", "gradient"), ours, eager, truth, strict=True):
        assert_as_exact_as_eager(a.detach(), b.detach(), c.detach(), name)
    if extra:
        assert not ours[1][:, shape[1] :].any()


def test_what_is_masked_may_be_anything(operators: torch._ops._OpNamespace) -> None:
    output, target, weight, mask = case((2, 3, 5, 7), "half", torch.float32, torch.float32, 0)
    clean = operators.weighted_mse(output, target, weight, mask)
    output = output.masked_fill(~mask, float("nan")).requires_grad_()
    dirty = operators.weighted_mse(output, target, weight, mask)
    assert torch.equal(clean, dirty.detach())
    (grad,) = torch.autograd.grad(dirty.sum(), output)
    assert torch.equal(grad == 0, ~mask.expand_as(grad))


def test_a_nan_stays_in_its_sample(operators: torch._ops._OpNamespace) -> None:
    output, target, weight, _ = case((3, 2, 5, 7), "none", torch.float32, torch.float32, 0)
    output[1, 0, 2, 3] = float("nan")
    assert operators.weighted_mse(output, target, weight, None).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4, 4)], ids=str)
def test_empty(operators: torch._ops._OpNamespace, shape: tuple[int, ...]) -> None:
    output = torch.zeros(shape, requires_grad=True)
    loss = operators.weighted_mse(output, torch.zeros(shape), torch.ones(shape[0]), None)
    assert loss.shape == (shape[0],) and not loss.any()
    (grad,) = torch.autograd.grad(loss.sum(), output)
    assert grad.shape == shape


def test_opcheck(operators: torch._ops._OpNamespace) -> None:
    output, target, weight, mask = case((2, 3, 5, 7), "half", torch.float32, torch.float32, 1)
    for given in (mask, None):
        inputs = (output.clone().requires_grad_(), target, weight, given)
        torch.library.opcheck(operators.weighted_mse.default, inputs)
        torch.library.opcheck(operators.weighted_mse_backward.default, (torch.ones(2), output, target, weight, given))


BAD = {
    "output": (torch.zeros(2, 3, 4), "weighted_mse: output: expected the shape of target"),
    "target": (torch.zeros(2, 3, 4, 4, dtype=torch.float64), "weighted_mse: target: expected float32"),
    "weight": (torch.ones(3), r"weighted_mse: weight: expected shape \(2,\), got \(3,\)"),
    "mask": (torch.ones(2, 3, 4, 4, dtype=torch.bool), r"weighted_mse: mask: expected shape \(2, 1, 4, 4\)"),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_refused(operators: torch._ops._OpNamespace, argument: str) -> None:
    good = dict(
        zip(("output", "target", "weight", "mask"), case((2, 3, 4, 4), "half", *[torch.float32] * 2, 0), strict=True)
    )
    value, message = BAD[argument]
    with pytest.raises(RuntimeError, match=message):
        operators.weighted_mse(**(good | {argument: value}))
    with pytest.raises(RuntimeError, match="output: expected a contiguous tensor"):
        operators.weighted_mse(**(good | {"output": good["output"].transpose(2, 3)}))


def test_the_entry_point_takes_any_strides_and_masks() -> None:
    output, target, weight, mask = case((2, 3, 4, 4), "half", torch.float32, torch.float32, 0)
    expected = reference(output, target, weight, mask)
    strided = output.to(memory_format=torch.channels_last)
    ours = weighted_mse(
        strided, target.transpose(2, 3).contiguous().transpose(2, 3), weight, mask.int(), kernels="required"
    )
    torch.testing.assert_close(ours, expected)


def test_gradcheck_of_the_reference() -> None:
    output, target, weight, mask = case((2, 3, 2, 2), "half", torch.float64, torch.float64, 1)
    assert torch.autograd.gradcheck(lambda o: weighted_mse(o, target, weight.double(), mask), output.requires_grad_())


def test_under_compile_and_checkpointing() -> None:
    output, target, weight, mask = case((2, 3, 4, 4), "half", torch.float32, torch.float32, 0)
    output.requires_grad_()

    def loss(output: Tensor) -> Tensor:
        return weighted_mse(2 * output, target, weight, mask, kernels="required").sum()

    plain = torch.autograd.grad(loss(output), output)[0]
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(output), output)[0]
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, output, use_reentrant=False), output)[0]
    assert torch.equal(plain, compiled) and torch.equal(plain, again)
