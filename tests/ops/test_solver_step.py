"""The sampler's update against float64, and as Euler, DPM-Solver++(2M) and UniPC against the papers' algorithms."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megadiff.ops.solver_step import reference, solver_step
from tests.ops.cases import KERNEL_DTYPES, assert_as_exact_as_eager, random

Namespace = torch._ops._OpNamespace
TO_M, NEXT, CORRECTOR = [0.6, -0.8], [0.7, 0.4, -0.2, 0.1, 0.3], [0.5, 0.3, 0.4, -0.2]
SHAPES = [(3, 3, 5, 7), (2, 1), (2, 4, 8, 8), (1, 67)]


def arguments(
    shape: tuple[int, ...], dtype: torch.dtype, output_dtype: torch.dtype, kind: str, extra: int = 0
) -> tuple[list[Tensor | None], tuple[object, ...]]:
    """The tensors and numbers of a call: plain, or with guidance, clipping, history, noise and corrector."""
    full = kind == "full"
    rows = shape[0] * (2 if full else 1)
    output = random("output", (rows, shape[1] + extra, *shape[2:]), output_dtype)
    rest = [random(name, shape, dtype) if full else None for name in ("x_last", "h1", "h2", "noise")]
    numbers = (TO_M, 0.9 if full else 0.0, NEXT, CORRECTOR if full else [], 3.0 if full else None, full)
    return [output, random("x", shape, dtype), *rest], numbers


@pytest.mark.parametrize("kind", ["plain", "full"])
@pytest.mark.parametrize("extra", [0, 2], ids=["", "learn_sigma"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("state_as_output", [True, False])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_the_update_is_as_exact_as_eager(
    operators: Namespace, dtype: torch.dtype, state_as_output: bool, shape: tuple[int, ...], extra: int, kind: str
) -> None:
    tensors, numbers = arguments(shape, dtype if state_as_output else torch.float32, dtype, kind, extra)
    ours, eager = operators.solver_step(*tensors, *numbers), reference(*tensors, *numbers)
    truth = reference(*(None if value is None else value.double() for value in tensors), *numbers)
    for name, a, b, c in zip(("next", "m", "base"), ours, eager, truth, strict=True):
        assert_as_exact_as_eager(a, b, c, name)


def test_a_nan_is_not_clipped_away(operators: Namespace) -> None:
    tensors, numbers = arguments((2, 3), torch.float32, torch.float32, "full")
    tensors[1][0, 1] = float("nan")
    following, m, _ = operators.solver_step(*tensors, *numbers)
    assert m.isnan().nonzero().tolist() == following.isnan().nonzero().tolist() == [[0, 1]]


# ---- solvers. The network knows the clean sample: x0 = cos(x), a smooth function, so that every order shows.

LEVELS = [0.9, 0.7, 0.5, 0.3, 0.1]  # of time u, falling; alpha = 1 - u and sigma = u, as in flow matching


def lam(u: float) -> float:
    """Half the log-SNR, log(alpha / sigma)."""
    return math.log((1 - u) / u)


Plan = Callable[[int], tuple[tuple[float, ...], tuple[float, ...]]]


def states_through(step: Callable, plan: Plan, start: Tensor) -> list[Tensor]:
    """Runs LEVELS with the weights (next, corrector) of `plan(i)`; the network answers with the clean sample."""
    x, h1, h2, base = start, None, None, None
    states = []
    for i in range(len(LEVELS) - 1):
        weights, corrector = plan(i)
        following, m, corrected = step(x.cos(), x, base, h1, h2, None, (0.0, 1.0), 0.0, weights, corrector, None, True)
        base = corrected if corrector else x
        x, h1, h2 = following, m, h1
        states.append(x)
    return states


def assert_solves(operators: Namespace, plan: Plan, start: Tensor, expected: list[Tensor]) -> None:
    """The coefficients are exact by the float64 reference, and the kernel takes them in float32."""
    for a, b in zip(states_through(reference, plan, start), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(states_through(operators.solver_step, plan, start.float()), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_euler(operators: Namespace) -> None:
    """x' = x + (u' - u) v with v = (x - x0) / u (flow matching, Lipman et al. 2023)."""
    start = random("start", (2, 3, 4), torch.float64)

    def plan(i: int):
        u, following = LEVELS[i], LEVELS[i + 1]
        return (following / u, 1 - following / u, 0, 0, 0), ()

    x, expected = start, []
    for u, following in itertools.pairwise(LEVELS):
        x = x + (following - u) * (x - x.cos()) / u
        expected.append(x)
    assert_solves(operators, plan, start, expected)


def multistep(i: int) -> tuple[float, float, float, float]:
    """sigma'/sigma, alpha' (1 - e^-h), h and r = h_last / h of a step."""
    u, following = LEVELS[i], LEVELS[i + 1]
    h = lam(following) - lam(u)
    r = (lam(u) - lam(LEVELS[i - 1])) / h if i else math.nan
    return following / u, -(1 - following) * math.expm1(-h), h, r


def test_dpm_solver_pp_2m(operators: Namespace) -> None:
    """Lu et al. 2022 (arXiv 2211.01095), algorithm 2."""
    start = random("start", (2, 3, 4), torch.float64)

    def plan(i: int):
        decay, gain, _, r = multistep(i)
        if i == 0:
            return (decay, gain, 0, 0, 0), ()
        return (decay, gain * (1 + 1 / (2 * r)), -gain / (2 * r), 0, 0), ()

    x, last, expected = start, None, []
    for i in range(len(LEVELS) - 1):
        decay, gain, _, r = multistep(i)
        m = x.cos()
        d = m if last is None else (1 + 1 / (2 * r)) * m - 1 / (2 * r) * last
        x, last = decay * x + gain * d, m
        expected.append(x)
    assert_solves(operators, plan, start, expected)


def test_unipc_2(operators: Namespace) -> None:
    """Zhao et al. 2023 (arXiv 2302.04867), data prediction, order 2 with B(h) = e^h - 1 in the form of B2.

    Predictor (order 2): D1 = (m_last - m) / r0. Corrector: D's of the last and the new answer with its rho.
    """
    start = random("start", (2, 3, 4), torch.float64)

    def corrector_weights(i: int) -> tuple[float, float, float, float]:
        """(base_last, h1, h2, m) of the state at level i, corrected with the answer m there; the step was i - 1."""
        decay, _, h, _ = multistep(i - 1)
        alpha, minus = 1 - LEVELS[i], math.expm1(-h)  # minus = e^-h - 1
        b = minus  # B2(hh) with hh = -h
        if i == 1:  # order 1: rho = 1/2 on D_new = m - h1
            return decay, -alpha * minus - alpha * b * -0.5, 0.0, -alpha * b * 0.5
        rho_last, rho_new = rhos(h, (lam(LEVELS[i - 2]) - lam(LEVELS[i - 1])) / h)
        rk = (lam(LEVELS[i - 2]) - lam(LEVELS[i - 1])) / h
        # -alpha minus h1 - alpha b (rho_last (h2 - h1) / rk + rho_new (m - h1))
        return (
            decay,
            -alpha * minus + alpha * b * (rho_last / rk + rho_new),
            -alpha * b * rho_last / rk,
            -alpha * b * rho_new,
        )

    def plan(i: int):
        decay, gain, h, _ = multistep(i)
        alpha, b = 1 - LEVELS[i + 1], math.expm1(-h)
        corrector = corrector_weights(i) if i else ()
        if i == 0:
            return (decay, gain, 0, 0, 0), corrector
        rk = (lam(LEVELS[i - 1]) - lam(LEVELS[i])) / h
        # Predictor of order 2: rho = 1/2 on (h1 - m) / rk.
        return (decay, gain + alpha * b * 0.5 / rk, -alpha * b * 0.5 / rk, 0, 0), corrector

    assert_solves(operators, plan, start, unipc_by_hand(start))


def rhos(h: float, rk: float) -> tuple[float, float]:
    """The two weights of the corrector of order 2: R rho = b with rows (1, 1) and (rk, 1)."""
    hh = -h
    phi1 = math.expm1(hh) / hh - 1
    phi2 = phi1 / hh - 0.5
    big_b = math.expm1(hh)
    matrix = torch.tensor([[1.0, 1.0], [rk, 1.0]], dtype=torch.float64)
    right = torch.tensor([phi1 / big_b, 2 * phi2 / big_b], dtype=torch.float64)
    return tuple(torch.linalg.solve(matrix, right).tolist())


def unipc_by_hand(start: Tensor) -> list[Tensor]:
    """UniPC as the paper writes it: correct the state with the new answer, then predict the next one."""
    x, base, h1, h2, states = start, None, None, None, []
    for i in range(len(LEVELS) - 1):
        m = x.cos()
        if i:
            h = lam(LEVELS[i]) - lam(LEVELS[i - 1])
            alpha, b = 1 - LEVELS[i], math.expm1(-h)
            x_first = LEVELS[i] / LEVELS[i - 1] * base - alpha * b * h1
            if i == 1:
                x = x_first - alpha * b * 0.5 * (m - h1)
            else:
                rk = (lam(LEVELS[i - 2]) - lam(LEVELS[i - 1])) / h
                rho_last, rho_new = rhos(h, rk)
                x = x_first - alpha * b * (rho_last * (h2 - h1) / rk + rho_new * (m - h1))
        base = x
        h = lam(LEVELS[i + 1]) - lam(LEVELS[i])
        alpha, b = 1 - LEVELS[i + 1], math.expm1(-h)
        x = LEVELS[i + 1] / LEVELS[i] * base - alpha * b * m
        if i:
            rk = (lam(LEVELS[i - 1]) - lam(LEVELS[i])) / h
            x = x - alpha * b * 0.5 * (h1 - m) / rk
        h1, h2 = m, h1
        states.append(x)
    return states


# ---- form


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0)], ids=str)
def test_empty(operators: Namespace, shape: tuple[int, ...]) -> None:
    tensors, numbers = arguments(shape, torch.float32, torch.float32, "full")
    assert [tuple(value.shape) for value in operators.solver_step(*tensors, *numbers)] == [shape] * 3


def test_outputs_that_nobody_wants_are_empty(operators: Namespace) -> None:
    tensors, numbers = arguments((2, 3, 5), torch.float32, torch.float32, "plain")
    following, m, base = operators.solver_step(*tensors, *numbers)
    assert m.numel() == base.numel() == 0
    kept = operators.solver_step(*tensors, *numbers[:-1], True)
    assert torch.equal(kept[0], following) and kept[1].shape == following.shape


def test_opcheck(operators: Namespace) -> None:
    for kind in ("plain", "full"):
        tensors, numbers = arguments((2, 3, 5), torch.float32, torch.float32, kind)
        torch.library.opcheck(operators.solver_step.default, (*tensors, *numbers))


def test_bad_input_is_refused(operators: Namespace) -> None:
    (output, x, *rest), numbers = arguments((2, 3, 4), torch.float32, torch.float32, "full")
    with pytest.raises(
        RuntimeError, match=r"solver_step: output: expected \(4, 3, 4\) or more channels, got \(2, 3, 4\)"
    ):
        operators.solver_step(output[:2], x, *rest, *numbers)
    with pytest.raises(RuntimeError, match="solver_step: x: expected float32 or the dtype of output, got bfloat16"):
        operators.solver_step(output, x.bfloat16(), *rest, *numbers)
    with pytest.raises(RuntimeError, match=r"solver_step: h1: expected shape \(2, 3, 4\), got \(1, 3, 4\)"):
        operators.solver_step(output, x, rest[0], rest[1][:1], *rest[2:], *numbers)
    with pytest.raises(RuntimeError, match="solver_step: next_weights: expected 5 numbers, got 2"):
        operators.solver_step(output, x, *rest, TO_M, 0.0, [1.0, 2.0], [], 3.0, True)
    with pytest.raises(RuntimeError, match="solver_step: x_last: expected a tensor"):
        operators.solver_step(output, x, None, *rest[1:], *numbers)


def test_the_entry_point_takes_any_strides_and_float64() -> None:
    (output, x, *_), _ = arguments((2, 3, 4), torch.float32, torch.float32, "plain")
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    kernel, plain = (
        solver_step(output, strided, to_m=TO_M, next_weights=NEXT, kernels=mode) for mode in ("required", "off")
    )
    double = solver_step(output.double(), x.double(), to_m=TO_M, next_weights=NEXT)
    for a, b, c in zip(kernel, plain, double, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a.double(), c, rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match=r"x is torch.bfloat16; expected torch.float32, float32 or float64"):
        solver_step(output, x.bfloat16(), to_m=TO_M, next_weights=NEXT)
