"""GroupNorm-SiLU: both kernels against float64 in both layouts, odd group sizes, bad input."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megadiff.ops.group_norm_silu import group_norm_silu, reference
from tests.ops.cases import KERNEL_DTYPES, assert_as_exact_as_eager, random

EPS = 1e-5
Namespace = torch._ops._OpNamespace
Inputs = list[Tensor | None]
NAMES = ("y", "x", "weight", "bias", "offset", "scale", "shift")
# Shape and groups. The last column of the comment is the number of elements of a group or its channels (pitfall B38).
SHAPES = [
    ((2, 6, 1, 1), 2),  # 3 elements
    ((3, 5, 7, 5), 5),  # 1 channel
    ((2, 15, 7, 5), 5),  # 3 channels
    ((2, 20, 7, 5), 4),  # 5 channels
    ((2, 24, 3), 2),  # 12 channels, one spatial dim
    ((1, 33, 7, 5), 1),  # 33 channels
    ((2, 40), 4),  # no spatial dim
    ((2, 32, 2, 7, 5), 4),  # three spatial dims
    ((2, 64, 12, 12), 32),  # several blocks of rows channels-last
]
SMALL = ((2, 6, 7, 5), 3)


def case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    given: str = "weight bias offset scale shift",
    mean: float = 0.0,
    channels_last: bool = False,
) -> Inputs:
    """x and the parameters that are given; scale and shift are the halves of one tensor, so their rows lie apart."""
    x = (random("x", shape) + mean).to(dtype)
    if channels_last:
        x = to_channels_last(x)
    scale, shift = random("modulation", (shape[0], 2 * shape[1]), param_dtype).chunk(2, dim=-1)
    parameters = {
        "weight": random("weight", shape[1:2], param_dtype),
        "bias": random("bias", shape[1:2], param_dtype),
        "offset": random("offset", shape[:2], param_dtype),
        "scale": scale,
        "shift": shift,
    }
    return [x, *(value if name in given.split() else None for name, value in parameters.items())]


def to_channels_last(x: Tensor) -> Tensor:
    """Adjacent channels, for any number of spatial dims."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def with_gradients(function, inputs: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The output and the gradient of every input that is there, by name."""
    leaves = [
        None if value is None else (value if dtype is None else value.to(dtype)).detach().requires_grad_()
        for value in inputs
    ]
    present = {name: leaf for name, leaf in zip(NAMES[1:], leaves, strict=True) if leaf is not None}
    y = function(*leaves)
    assert inputs[0] is not None
    grad = torch.empty_like(y).copy_(random("grad", tuple(y.shape), inputs[0].dtype))
    grads = torch.autograd.grad(y, tuple(present.values()), grad)
    return {"y": y.detach()} | dict(zip(present, grads, strict=True))


def compare(operators: Namespace, inputs: Inputs, groups: int, silu: bool = True) -> None:
    def fused(*tensors: Tensor | None) -> Tensor:
        return operators.group_norm_silu(*tensors, groups, EPS, silu)[0]

    def eager(*tensors: Tensor | None) -> Tensor:
        return reference(*tensors, groups, EPS, silu)

    ours, plain = with_gradients(fused, inputs), with_gradients(eager, inputs)
    truth = with_gradients(eager, inputs, torch.float64)
    assert ours["y"].stride() == inputs[0].stride() and ours["x"].stride() == inputs[0].stride()
    for name in truth:
        assert_as_exact_as_eager(ours[name], plain[name], truth[name], name)


@pytest.mark.parametrize("params_as_x", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_b38_as_exact_as_eager(
    operators: Namespace,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    groups: int,
    channels_last: bool,
    params_as_x: bool,
) -> None:
    param_dtype = dtype if params_as_x else torch.float32
    compare(operators, case(shape, dtype, param_dtype, channels_last=channels_last), groups)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("given", ["", "weight", "bias", "offset", "scale", "shift", "weight bias"])
def test_every_parameter_is_optional(operators: Namespace, given: str, silu: bool, channels_last: bool) -> None:
    shape, groups = SMALL
    compare(operators, case(shape, *[torch.float32] * 2, given, channels_last=channels_last), groups, silu)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(2, 64, 16, 16), (2, 64, 33, 31)], ids=str)
def test_b38_with_a_mean_of_1000_standard_deviations(
    operators: Namespace, shape: tuple[int, ...], channels_last: bool
) -> None:
    compare(operators, case(shape, *[torch.float32] * 2, "weight bias", 1e3, channels_last), 32)


@pytest.mark.parametrize("channels_last", [False, True])
def test_b38_an_outlier_where_the_sums_start(operators: Namespace, channels_last: bool) -> None:
    inputs = case((2, 8, 16, 16), *[torch.float32] * 2, "weight bias", 1e3, channels_last)
    inputs[0][:, :, 0, 0] = 0.0
    compare(operators, inputs, 2)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_b38_one_element_a_group(operators: Namespace, dtype: torch.dtype, channels_last: bool) -> None:
    inputs = case((2, 6, 1, 1), dtype, torch.float32, "weight bias", channels_last=channels_last)
    got = with_gradients(lambda *tensors: operators.group_norm_silu(*tensors, 6, EPS, True)[0], inputs)
    bias = inputs[2]
    expected = F.silu(bias).to(dtype).expand(2, 6)[:, :, None, None]
    torch.testing.assert_close(got["y"], expected)
    # The gradient through a norm of one value is 0, but for rounding of terms of the size of 1 / sqrt(eps).
    assert got["x"].abs().max() < 1e-6 / EPS**0.5 and got["weight"].abs().max() < 1e-6 / EPS**0.5


@pytest.mark.parametrize("channels_last", [False, True])
def test_b38_a_constant_group_and_a_nan_stay_in_their_groups(operators: Namespace, channels_last: bool) -> None:
    shape, groups = (2, 6, 7, 5), 3
    x, *parameters = case(shape, *[torch.float32] * 2, "weight bias", channels_last=channels_last)
    x[0, 2:4] = 0.1
    x[1, 5, 2, 2] = float("nan")
    got = with_gradients(lambda *t: operators.group_norm_silu(*t, groups, EPS, True)[0], [x, *parameters])
    expected = F.silu(parameters[1][2:4])[:, None, None].expand(2, 7, 5)
    assert torch.equal(got["y"][0, 2:4], expected)
    for name in ("y", "x"):
        nan = got[name].isnan().flatten(2).all(2)
        assert torch.equal(nan, got[name].isnan().flatten(2).any(2))
        assert nan.nonzero().tolist() == [[1, 4], [1, 5]]
    assert got["weight"].isnan().nonzero().tolist() == [[4], [5]]


@pytest.mark.parametrize("shape", [(0, 6, 7, 5), (2, 6, 0, 5)], ids=str)
def test_empty(operators: Namespace, shape: tuple[int, ...]) -> None:
    inputs = case(shape, *[torch.float32] * 2)
    got = with_gradients(lambda *tensors: operators.group_norm_silu(*tensors, 3, EPS, True)[0], inputs)
    assert got["y"].shape == got["x"].shape == shape
    assert not any(value.any() for value in got.values())


@pytest.mark.parametrize("channels_last", [False, True])
def test_runs_repeat_bit_for_bit_on_any_number_of_threads(operators: Namespace, channels_last: bool) -> None:
    inputs = case((3, 8, 24, 24), *[torch.float32] * 2, channels_last=channels_last)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        results.append(with_gradients(lambda *t: operators.group_norm_silu(*t, 4, EPS, True)[0], inputs))
    torch.set_num_threads(threads)
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in results[0])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("given", ["", "weight bias offset scale shift"])
def test_opcheck(operators: Namespace, given: str, channels_last: bool) -> None:
    shape, groups = SMALL
    inputs = case(shape, *[torch.float32] * 2, given, channels_last=channels_last)
    leaves = [None if value is None else value.requires_grad_() for value in inputs]
    torch.library.opcheck(operators.group_norm_silu.default, (*leaves, groups, EPS, True))
    plain = [None if value is None else value.detach() for value in inputs]
    _, mean, rstd = operators.group_norm_silu(*plain, groups, EPS, True)
    torch.library.opcheck(
        operators.group_norm_silu_backward.default, (torch.ones_like(plain[0]), *plain, mean, rstd, groups, True)
    )


BAD = {
    "float64": ("x", lambda x: x.double(), "x: expected float32 or bfloat16 or float16, got float64"),
    "one dim": ("x", lambda x: x[0, :, 0, 0], "x: expected at least 2 dims"),
    "strides": ("x", lambda x: x.transpose(2, 3), "x: expected a contiguous or channels-last tensor"),
    "groups": ("groups", lambda groups: 4, "groups: expected a divisor of 6 channels, got 4"),
    "no groups": ("groups", lambda groups: 0, "groups: expected a divisor of 6 channels, got 0"),
    "weight": ("weight", lambda weight: weight[:5], r"weight: expected shape \(6,\), got \(5,\)"),
    "bias": ("bias", lambda bias: bias.half(), "bias: expected float32"),
    "offset": ("offset", lambda offset: offset[:1], r"offset: expected shape \(2, 6\), got \(1, 6\)"),
    "gap": ("scale", lambda scale: scale.repeat(1, 2)[:, ::2], "scale: expected adjacent channels"),
    "shift": ("shift", lambda shift: shift.flatten(), r"shift: expected shape \(2, 6\), got \(12,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(operators: Namespace, name: str) -> None:
    argument, change, message = BAD[name]
    arguments = dict(zip(NAMES[1:], case(SMALL[0], *[torch.float32] * 2), strict=True)) | {"groups": SMALL[1]}
    arguments["shift"], arguments["scale"] = arguments["shift"].contiguous(), arguments["scale"].contiguous()
    arguments[argument] = change(arguments[argument])
    with pytest.raises(RuntimeError, match=f"megadiff::group_norm_silu: {message}"):
        operators.group_norm_silu(**arguments, eps=EPS, silu=True)


def test_parameters_of_two_dtypes_and_a_gradient_in_another_layout_are_refused(operators: Namespace) -> None:
    inputs = case(SMALL[0], torch.bfloat16, torch.bfloat16)
    with pytest.raises(RuntimeError, match="megadiff::group_norm_silu: bias: expected bfloat16, got float32"):
        operators.group_norm_silu(*inputs[:2], inputs[2].float(), *inputs[3:], SMALL[1], EPS, True)
    _, mean, rstd = operators.group_norm_silu(*inputs, SMALL[1], EPS, True)
    grad = to_channels_last(inputs[0])
    with pytest.raises(RuntimeError, match="group_norm_silu_backward: y_grad: expected the memory layout of x"):
        operators.group_norm_silu_backward(grad, *inputs, mean, rstd, SMALL[1], True)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.channels_last_3d])
def test_the_entry_point_keeps_channels_last(layout: torch.memory_format) -> None:
    shape = (2, 6, 7, 5) if layout == torch.channels_last else (2, 6, 2, 7, 5)
    x = random("x", shape).contiguous(memory_format=layout).requires_grad_()
    y = group_norm_silu(x, 3, kernels="required")
    (grad,) = torch.autograd.grad(y, x, random("grad", shape))  # a gradient in the other layout
    assert y.is_contiguous(memory_format=layout) and grad.is_contiguous(memory_format=layout)
    torch.testing.assert_close(y, reference(x, *[None] * 5, 3, EPS, True))


def test_the_entry_point_takes_any_strides_and_mixed_dtypes() -> None:
    x, weight, bias, offset, scale, shift = case(SMALL[0], torch.bfloat16, torch.float32)
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    offset = offset.t().contiguous().t()
    ours = group_norm_silu(
        strided, 3, weight.bfloat16(), bias, EPS, offset=offset, scale=scale, shift=shift, kernels="required"
    )
    torch.testing.assert_close(ours, reference(x, weight.bfloat16(), bias, offset, scale, shift, 3, EPS, True))
    assert ours.is_contiguous()


def test_gradcheck_of_the_reference() -> None:
    inputs = [value.requires_grad_() for value in case((2, 4, 3, 2), torch.float64, torch.float64)]
    assert torch.autograd.gradcheck(
        lambda x, weight, bias, offset, scale, shift: group_norm_silu(
            x, 2, weight, bias, EPS, offset=offset, scale=scale, shift=shift
        ),
        inputs,
    )


def test_under_compile_and_checkpointing() -> None:
    inputs = [value.requires_grad_() for value in case(SMALL[0], *[torch.float32] * 2)]

    def block(x: Tensor, *parameters: Tensor) -> Tensor:
        weight, bias, offset, scale, shift = parameters
        y = group_norm_silu(2 * x, 3, weight, bias, EPS, offset=offset, scale=scale, shift=shift, kernels="required")
        return y.square().sum()

    def gradients(function) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*inputs), inputs)

    plain = gradients(block)
    compiled = gradients(torch.compile(block, fullgraph=True, backend="aot_eager"))
    again = gradients(lambda *tensors: torch.utils.checkpoint.checkpoint(block, *tensors, use_reentrant=False))
    for a, b, c in zip(plain, compiled, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_the_kernel_saves_the_input_and_two_numbers_a_group() -> None:
    x, weight, bias, *_ = case((2, 6, 7, 5), *[torch.float32] * 2, "weight bias")
    saved: list[Tensor] = []
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        group_norm_silu(leaves[0], 3, *leaves[1:], kernels="required")
    assert sorted(tensor.numel() for tensor in saved) == [6, 6, 6, 6, x.numel()]
