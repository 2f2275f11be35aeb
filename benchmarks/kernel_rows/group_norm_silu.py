"""GroupNorm-SiLU against eager PyTorch: time, bytes kept, error; on CUDA the share of copy bandwidth."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from kernel_rows.timing import geometric_mean, interleaved, speed_row
from report import Row
from torch import Tensor

from megadiff.ops.group_norm_silu import group_norm_silu

_GROUPS = 32
_SHAPES = [(4, 320, 64, 64), (4, 640, 32, 32), (4, 1280, 16, 16), (4, 128, 256, 256)]
_QUICK = [(2, 64, 8, 8)]
# bf16 sizes far beyond the second-level cache; those of the second list have groups that fit in shared memory.
_CUDA_SHAPES = [(32, 320, 64, 64), (16, 128, 256, 256)]
_CUDA_ONE_PASS_SHAPES = [(128, 640, 32, 32), (256, 1280, 16, 16)]
_VAE_SHAPE = (1, 128, 20, 256, 256)
_Function = Callable[[Tensor, Tensor, Tensor], Tensor]
_Inputs = tuple[Tensor, Tensor, Tensor]


def rows(repeats: int, quick: bool, device: str) -> list[Row]:
    """The rows of a device; a speed is the geometric mean over its shapes."""
    return _cpu_rows(repeats, quick) if device == "cpu" else _cuda_rows(repeats, quick)


def _ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return group_norm_silu(x, _GROUPS, weight, bias, kernels="required")


def _eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, _GROUPS, weight, bias))


def _inputs(
    shape: tuple[int, ...], device: str, dtype: torch.dtype, channels_last: bool = False, mean: float = 0.0
) -> _Inputs:
    x = torch.randn(shape, device=device).add_(mean).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    weight, bias = (torch.randn(shape[1], device=device, dtype=dtype).requires_grad_() for _ in range(2))
    return x.requires_grad_(), weight, bias


# ---- CPU


def _cpu_rows(repeats: int, quick: bool) -> list[Row]:
    shapes = _QUICK if quick else _SHAPES
    note = f"float32, geometric mean over {shapes}, against F.silu(F.group_norm(...))"
    rows = [
        _speed("group_norm_silu forward, NCHW", _forward_times, shapes, False, repeats, 1.8, 2.4, note),
        _speed("group_norm_silu forward, channels-last", _forward_times, shapes, True, repeats, 1.7, 2.2),
        _speed("group_norm_silu backward, NCHW", _backward_times, shapes, False, repeats, 2.0, 2.5),
        _speed("group_norm_silu backward, channels-last", _backward_times, shapes, True, repeats, None, None),
    ]
    compiled = torch.compile(_eager, dynamic=False)
    times = [_forward_times(_inputs(shape, "cpu", torch.float32), repeats, "cpu", compiled) for shape in shapes]
    rows.append(_mean_speed("group_norm_silu forward, NCHW, against torch.compile", times, 2.0, None))
    rows.append(_bytes_saved(shapes[0]))
    return rows + [row for mean in (0.0, 1e3) for row in _errors(shapes[0], mean)]


def _speed(
    name: str,
    times_of: Callable[[_Inputs, int, str], tuple[float, float]],
    shapes: Sequence[tuple[int, ...]],
    channels_last: bool,
    repeats: int,
    must: float | None,
    aim: float | None,
    note: str = "",
) -> Row:
    inputs = (_inputs(shape, "cpu", torch.float32, channels_last) for shape in shapes)
    return _mean_speed(name, [times_of(each, repeats, "cpu") for each in inputs], must, aim, note)


def _mean_speed(
    name: str, times: list[tuple[float, float]], must: float | None, aim: float | None, note: str = ""
) -> Row:
    ours, other = (geometric_mean(list(seconds)) for seconds in zip(*times, strict=True))
    return speed_row(name, ours, other, must, aim, note)


def _forward_times(inputs: _Inputs, repeats: int, device: str, other: _Function = _eager) -> tuple[float, float]:
    with torch.no_grad():
        return interleaved(lambda: _ours(*inputs), lambda: other(*inputs), repeats, device)


def _backward_times(inputs: _Inputs, repeats: int, device: str) -> tuple[float, float]:
    grad = torch.randn_like(inputs[0])

    def backward_of(function: _Function) -> Callable[[], object]:
        y = function(*inputs)
        return lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True)

    return interleaved(backward_of(_ours), backward_of(_eager), repeats, device)


def _bytes_saved(shape: tuple[int, ...]) -> Row:
    inputs = _inputs(shape, "cpu", torch.float32)

    def saved_by(function: _Function) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(*inputs)
        return sum(sizes.values())

    ours, eager = saved_by(_ours), saved_by(_eager)
    name = "group_norm_silu bytes saved for backward"
    return Row(name, ours / 2**20, eager / 2**20, "MiB", ours / eager, 0.55, 0.5, lower_is_better=True)


def _errors(shape: tuple[int, ...], mean: float) -> list[Row]:
    inputs = _inputs(shape, "cpu", torch.float32, mean=mean)
    grad = torch.randn_like(inputs[0])

    def results(function: _Function, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        y = function(*leaves)
        return y.detach(), torch.autograd.grad(y, leaves[0], grad.to(dtype))[0]

    truth = results(_eager, torch.float64)
    ours, eager = (
        [(value.double() - true).abs().max().item() for value, true in zip(got, truth, strict=True)]
        for got in (results(_ours, torch.float32), results(_eager, torch.float32))
    )
    return [
        Row(
            f"group_norm_silu error of {name}, mean/std = {mean:g}",
            *(ours[index], eager[index], "max abs", ours[index] / eager[index], 2.0),
            lower_is_better=True,
        )
        for index, name in enumerate(("y", "x's gradient"))
    ]


# ---- CUDA


def _cuda_rows(repeats: int, quick: bool) -> list[Row]:
    shapes, one_pass, vae = (
        (_QUICK, _QUICK, (1, 32, 2, 8, 8)) if quick else (_CUDA_SHAPES, _CUDA_ONE_PASS_SHAPES, _VAE_SHAPE)
    )
    rows = []
    for shape in shapes:
        rows += _channels_last_rows(shape, repeats)
    for shape in one_pass:
        inputs = _inputs(shape, "cuda", torch.bfloat16)
        ours, eager = _forward_times(inputs, repeats, "cuda")
        rows.append(_bandwidth(f"group_norm_silu one pass, NCHW {shape}", inputs[0], ours, 4, 0.60, repeats))
        rows.append(speed_row(f"group_norm_silu one pass, NCHW {shape}, against eager", ours, eager))
    inputs = _inputs(vae, "cuda", torch.bfloat16)
    rows.append(speed_row(f"group_norm_silu forward, {vae}", *_forward_times(inputs, repeats, "cuda"), 10.0))
    return rows


def _channels_last_rows(shape: tuple[int, ...], repeats: int) -> list[Row]:
    inputs = _inputs(shape, "cuda", torch.bfloat16, channels_last=True)
    forward, eager_forward = _forward_times(inputs, repeats, "cuda")
    backward, eager_backward = _backward_times(inputs, repeats, "cuda")
    name = f"channels-last {shape}"
    return [
        _bandwidth(f"group_norm_silu forward, {name}", inputs[0], forward, 6, 0.75, repeats),
        speed_row(f"group_norm_silu forward, {name}, against eager", forward, eager_forward, 2.5),
        _bandwidth(f"group_norm_silu backward, {name}", inputs[0], backward, 10, 0.65, repeats),
        speed_row(f"group_norm_silu backward, {name}, against eager", backward, eager_backward),
    ]


def _bandwidth(name: str, x: Tensor, seconds: float, bytes_an_element: int, must: float, repeats: int) -> Row:
    """The share of the bandwidth of a copy of x in the same run."""
    source = x.detach()
    target = torch.empty_like(source)
    copy, _ = interleaved(lambda: target.copy_(source), lambda: target.copy_(source), repeats, "cuda")
    ours = bytes_an_element * x.numel() / seconds / 1e9
    limit = 2 * x.element_size() * x.numel() / copy / 1e9
    note = f"bf16, {bytes_an_element} bytes an element against a copy_ of x"
    return Row(name, ours, limit, "GB/s", ours / limit, must, note=note)
