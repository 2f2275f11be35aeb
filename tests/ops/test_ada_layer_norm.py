"""Adaptive LayerNorm and gated residual: both kernels against float64, odd sizes, bad input."""

import pytest
import torch
from torch import Tensor

from megadiff.ops.ada_layer_norm import (
    ada_layer_norm,
    ada_layer_norm_reference,
    gated_residual,
    gated_residual_reference,
)
from tests.ops.cases import KERNEL_DTYPES, assert_as_exact_as_eager, random

EPS = 1e-6
# Widths at and beside multiples of a vector and a warp, one too wide for shared memory, more rows than a block takes.
SHAPES = [(2, 5, 64), (2, 1, 3), (3, 7, 33), (2, 35, 12), (1, 2, 3080), (2, 17, 1152)]
Namespace = torch._ops._OpNamespace


def norm_case(
    shape: tuple[int, int, int], dtype: torch.dtype, param_dtype: torch.dtype, mean: float = 0.0
) -> list[Tensor]:
    """x, shift and scale; shift and scale are the halves of one tensor, so their rows lie apart."""
    shift, scale = random("vectors", (shape[0], 2 * shape[2]), param_dtype).chunk(2, dim=-1)
    return [(random("x", shape) + mean).to(dtype), shift, scale]


def with_gradients(function, inputs: list[Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The output and every input's gradient of `function`."""
    leaves = [(value if dtype is None else value.to(dtype)).detach().requires_grad_() for value in inputs]
    out = function(*leaves)
    grad = random("grad", tuple(out.shape), inputs[0].dtype).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, grad)
    return {"output": out.detach()} | {f"gradient {index}": value for index, value in enumerate(grads)}


def compare(fused, eager, inputs: list[Tensor]) -> None:
    ours, plain = with_gradients(fused, inputs), with_gradients(eager, inputs)
    truth = with_gradients(eager, inputs, torch.float64)
    for name in truth:
        assert_as_exact_as_eager(ours[name], plain[name], truth[name], name)


@pytest.mark.parametrize("params_as_x", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_norm_is_as_exact_as_eager(
    operators: Namespace, dtype: torch.dtype, shape: tuple[int, int, int], params_as_x: bool
) -> None:
    inputs = norm_case(shape, dtype, dtype if params_as_x else torch.float32)
    compare(
        lambda *tensors: operators.ada_layer_norm(*tensors, EPS)[0],
        lambda *tensors: ada_layer_norm_reference(*tensors, EPS),
        inputs,
    )


def test_b38_norm_with_a_large_mean(operators: Namespace) -> None:
    inputs = norm_case((2, 5, 640), torch.float32, torch.float32, mean=1e3)
    compare(
        lambda *tensors: operators.ada_layer_norm(*tensors, EPS)[0],
        lambda *tensors: ada_layer_norm_reference(*tensors, EPS),
        inputs,
    )


def test_b38_a_constant_row_and_a_nan_stay_in_their_rows(operators: Namespace) -> None:
    x, shift, scale = norm_case((2, 5, 64), torch.float32, torch.float32)
    x[0, 1] = 3.0
    x[1, 2, 5] = float("nan")
    y = operators.ada_layer_norm(x, shift, scale, EPS)[0]
    assert torch.equal(y[0, 1], shift[0])
    assert y.isnan().any(-1).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("params_as_x", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_gate_is_as_exact_as_eager(
    operators: Namespace, dtype: torch.dtype, shape: tuple[int, int, int], params_as_x: bool
) -> None:
    gate = random("gates", (shape[0], 3 * shape[2]), dtype if params_as_x else torch.float32)[
        :, shape[2] : 2 * shape[2]
    ]
    inputs = [random("x", shape, dtype), random("y", shape, dtype), gate]
    compare(operators.gated_residual, gated_residual_reference, inputs)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)], ids=str)
def test_empty(operators: Namespace, shape: tuple[int, int, int]) -> None:
    inputs = norm_case(shape, torch.float32, torch.float32)
    got = with_gradients(lambda *tensors: operators.ada_layer_norm(*tensors, EPS)[0], inputs)
    got |= with_gradients(operators.gated_residual, [inputs[0], inputs[0], inputs[1]])
    assert got["output"].shape == shape
    assert not any(value.any() for value in got.values())


def test_opcheck(operators: Namespace) -> None:
    x, shift, scale = (value.requires_grad_() for value in norm_case((2, 5, 12), torch.float32, torch.float32))
    torch.library.opcheck(operators.ada_layer_norm.default, (x, shift, scale, EPS))
    torch.library.opcheck(operators.gated_residual.default, (x, x, scale))
    x, scale = x.detach(), scale.detach()
    _, mean, rstd = operators.ada_layer_norm(x, scale, scale, EPS)
    torch.library.opcheck(operators.ada_layer_norm_backward.default, (x, x, scale, mean, rstd))
    torch.library.opcheck(operators.gated_residual_backward.default, (x, x, scale))


BAD = {
    "two dims": (lambda x, shift, scale: (x[0], shift, scale), r"x: expected 3 dims"),
    "float64": (lambda x, shift, scale: (x.double(), shift, scale), "x: expected float32 or bfloat16 or float16"),
    "shape": (lambda x, shift, scale: (x, shift[:, :3], scale), r"shift: expected shape \(2, 4\), got \(2, 3\)"),
    "dtype": (lambda x, shift, scale: (x, shift, scale.bfloat16()), "scale: expected float32"),
    "strides": (lambda x, shift, scale: (x.transpose(0, 1), shift, scale), "x: expected a contiguous tensor"),
    "gap": (lambda x, shift, scale: (x, shift, scale.repeat(1, 2)[:, ::2]), "scale: expected adjacent features"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(operators: Namespace, name: str) -> None:
    change, message = BAD[name]
    x, shift, scale = (value.contiguous() for value in norm_case((2, 2, 4), torch.float32, torch.float32))
    with pytest.raises(RuntimeError, match=f"megadiff::ada_layer_norm: {message}"):
        operators.ada_layer_norm(*change(x, shift, scale), EPS)
    if name == "shape":
        with pytest.raises(RuntimeError, match=r"megadiff::gated_residual: gate: expected shape \(2, 4\)"):
            operators.gated_residual(x, x, scale[:, :3])
        with pytest.raises(RuntimeError, match=r"megadiff::gated_residual: x: expected shape"):
            operators.gated_residual(x[:1], x, scale)


def test_entry_points_take_any_strides_and_mixed_dtypes() -> None:
    x, shift, scale = norm_case((4, 6, 8), torch.bfloat16, torch.float32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    ours = ada_layer_norm(strided, shift.bfloat16(), scale, EPS, kernels="required")
    torch.testing.assert_close(ours, ada_layer_norm_reference(x, shift.bfloat16(), scale, EPS))
    gate = scale.t().contiguous().t()
    ours = gated_residual(strided, x, gate, kernels="required")
    torch.testing.assert_close(ours, gated_residual_reference(x, x, gate))


def test_gradcheck_of_the_references() -> None:
    x, shift, scale = (value.requires_grad_() for value in norm_case((2, 3, 5), torch.float64, torch.float64))
    assert torch.autograd.gradcheck(lambda *tensors: ada_layer_norm(*tensors, EPS), (x, shift, scale))
    assert torch.autograd.gradcheck(gated_residual, (x, (x * 2).detach().requires_grad_(), scale))


def test_under_compile_and_checkpointing() -> None:
    x, shift, scale = (value.requires_grad_() for value in norm_case((2, 5, 12), torch.float32, torch.float32))

    def block(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        normed = ada_layer_norm(x, shift, scale, EPS, kernels="required")
        return gated_residual(x, normed, scale, kernels="required").square().sum()

    def gradients(function) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(x, shift, scale), (x, shift, scale))

    plain = gradients(block)
    compiled = gradients(torch.compile(block, fullgraph=True, backend="aot_eager"))
    again = gradients(lambda *tensors: torch.utils.checkpoint.checkpoint(block, *tensors, use_reentrant=False))
    for a, b, c in zip(plain, compiled, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_the_kernel_saves_the_input_and_two_numbers_a_token() -> None:
    x, shift, scale = (value.requires_grad_() for value in norm_case((2, 5, 64), torch.float32, torch.float32))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        ada_layer_norm(x, shift, scale, EPS, kernels="required")
    assert sorted(tensor.numel() for tensor in saved) == [10, 10, 128, 640]
