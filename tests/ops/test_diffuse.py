"""Noising: Philox integers equal on every path, all targets, rounding, bad input."""

import pytest
import torch
from torch import Tensor

from megadiff.diffusion.prediction import target, target_weights
from megadiff.errors import ConfigError
from megadiff.ops.diffuse import diffuse, diffuse_given, reference
from megadiff.ops.philox import Purpose, normal, random_bits
from tests.ops.cases import KERNEL_DTYPES, assert_as_exact_as_eager, random

Namespace = torch._ops._OpNamespace
WORD = 0xFFFFFFFF
SHAPES = [(3, 3, 5, 7), (2, 1), (1, 4, 64, 64), (2, 2, 8, 8), (5, 67), (2, 1031)]


def coefficients(batch: int, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """alpha, sigma, a, b of a batch for one target."""
    angle = random("angle", (batch,)).abs().to(dtype)
    if kind == "flow":
        u = angle.clamp(max=1)
        return torch.stack((1 - u, u, torch.ones_like(u), -torch.ones_like(u)), dim=1)
    alpha, sigma = angle.cos(), angle.sin()
    return torch.stack((alpha, sigma, *target_weights(kind, alpha, sigma)), dim=1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 63, 64, 65, 300])
@pytest.mark.parametrize(
    ("seed", "step", "ids", "purpose"),
    [
        (0, 0, [0, 1], Purpose.NOISE),
        (2**63 - 1, 2**32 - 1, [2**32, 2**55 + 7, 2**32 - 1], Purpose.DROPOUT),
        (2**40 + 3, 12345, [17], Purpose.TIMESTEP),
    ],
)
def test_the_integers_are_those_of_the_reference(
    operators: Namespace, seed: int, step: int, ids: list[int], purpose: Purpose, count: int
) -> None:
    sample_ids = torch.tensor(ids)
    words = operators.philox_bits(sample_ids, seed & WORD, seed >> 32, step, int(purpose), count)
    assert torch.equal(words, random_bits(seed, step, sample_ids, purpose, count))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_normals_are_those_of_the_reference(operators: Namespace, shape: tuple[int, ...]) -> None:
    seed, step = 2**35 + 11, 4
    ids = torch.arange(shape[0]) * 2**31
    only_noise = torch.tensor([[0.0, 1.0, 1.0, 0.0]]).expand(shape[0], 4).contiguous()
    x_t, noise = operators.diffuse(torch.zeros(shape), only_noise, ids, seed & WORD, seed >> 32, step, 0)
    expected = normal(seed, step, ids, Purpose.NOISE, shape[1:])
    assert torch.equal(x_t, noise)
    # The rounding of log, sqrt and the trigonometric functions, relative to the largest values.
    torch.testing.assert_close(noise, expected, rtol=3e-6, atol=1e-6)


def test_many_normals_agree_to_a_few_ulps_and_have_the_right_moments(operators: Namespace) -> None:
    """A million numbers; where the radius is tiny, float32 has only absolute accuracy."""
    ids = torch.arange(16)
    only_noise = torch.tensor([[0.0, 1.0, 1.0, 0.0]]).expand(16, 4).contiguous()
    count = 65536 if operators is torch.ops.megadiff else 4096
    noise = operators.diffuse(torch.zeros(16, count), only_noise, ids, 5, 0, 9, 0)[1]
    expected = normal(5, 9, ids, Purpose.NOISE, (count,))
    assert (noise - expected).abs().max() < 4e-6
    assert noise.mean().abs() < 5 / (16 * count) ** 0.5 and (noise.var() - 1).abs() < 8 / (16 * count) ** 0.5


@pytest.mark.parametrize("kind", ["eps", "x0", "v", "flow"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_given_noise_is_mixed_as_exactly_as_eager(
    operators: Namespace, dtype: torch.dtype, shape: tuple[int, ...], kind: str
) -> None:
    x0, noise, weights = random("x0", shape, dtype), random("noise", shape, dtype), coefficients(shape[0], kind)
    ours = operators.diffuse_given(x0, noise, weights)
    eager, truth = reference(x0, noise, weights), reference(x0.double(), noise.double(), weights.double())
    for name, a, b, c in zip(("x_t", "target"), ours, eager, truth, strict=True):
        assert_as_exact_as_eager(a, b, c, name)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_own_noise_is_the_given_noise_rounded_once(operators: Namespace, dtype: torch.dtype) -> None:
    shape, ids = (3, 3, 5, 7), torch.tensor([5, 6, 2**40])
    x0, weights = random("x0", shape, dtype), coefficients(3, "v")
    ours = operators.diffuse(x0, weights, ids, 7, 0, 3, 0)
    truth = reference(x0.double(), normal(7, 3, ids, Purpose.NOISE, shape[1:], torch.float64), weights.double())
    for a, b in zip(ours, truth, strict=True):
        # One rounding to the dtype and the float32 error of the normals.
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps / 2 + 4e-6, atol=8e-6)


@pytest.mark.parametrize("kind", ["eps", "x0", "v"])
def test_the_weights_give_the_target(kind: str) -> None:
    x0, noise = random("x0", (4, 3), torch.float64), random("noise", (4, 3), torch.float64)
    weights = coefficients(4, kind, torch.float64)
    alpha, sigma = weights[:, :1], weights[:, 1:2]
    by_hand = {"eps": noise, "x0": x0, "v": alpha * noise - sigma * x0}[kind]
    torch.testing.assert_close(reference(x0, noise, weights)[1], by_hand)
    torch.testing.assert_close(target(kind, x0, noise, alpha, sigma), by_hand)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0)], ids=str)
def test_empty(operators: Namespace, shape: tuple[int, ...]) -> None:
    x0, ids = torch.zeros(shape), torch.arange(shape[0])
    weights = torch.ones(shape[0], 4)
    for values in (*operators.diffuse(x0, weights, ids, 0, 0, 0, 0), *operators.diffuse_given(x0, x0, weights)):
        assert values.shape == shape
    assert operators.philox_bits(ids, 0, 0, 0, 0, 0).shape == (shape[0], 0)


def test_opcheck(operators: Namespace) -> None:
    x0, weights, ids = random("x0", (2, 3, 5)), coefficients(2, "v"), torch.arange(2)
    torch.library.opcheck(operators.diffuse.default, (x0, weights, ids, 1, 2, 3, 0))
    torch.library.opcheck(operators.diffuse_given.default, (x0, x0, weights))
    torch.library.opcheck(operators.philox_bits.default, (ids, 1, 2, 3, 0, 7))


def test_bad_input_is_refused(operators: Namespace) -> None:
    x0, weights, ids = random("x0", (2, 3)), coefficients(2, "v"), torch.arange(2)
    with pytest.raises(RuntimeError, match=r"diffuse: coefficients: expected shape \(2, 4\), got \(2, 3\)"):
        operators.diffuse(x0, weights[:, :3], ids, 0, 0, 0, 0)
    with pytest.raises(RuntimeError, match=r"diffuse: sample_ids: expected int64, got int32"):
        operators.diffuse(x0, weights, ids.int(), 0, 0, 0, 0)
    with pytest.raises(RuntimeError, match=r"diffuse: step: expected 0 <= step < 2\*\*32, got -1"):
        operators.diffuse(x0, weights, ids, 0, 0, -1, 0)
    with pytest.raises(RuntimeError, match=r"diffuse: seed_high: expected 0 <= seed_high < 2\*\*32, got -1"):
        operators.diffuse(x0, weights, ids, WORD, -1, 0, 0)
    with pytest.raises(RuntimeError, match="diffuse: purpose: expected 0 <= purpose < 256, got 256"):
        operators.diffuse(x0, weights, ids, 0, 0, 0, 256)
    with pytest.raises(RuntimeError, match="philox_bits: count: expected 0 or more, got -1"):
        operators.philox_bits(ids, 0, 0, 0, 0, -1)
    with pytest.raises(RuntimeError, match=r"diffuse_given: noise: expected float32, got bfloat16"):
        operators.diffuse_given(x0, x0.bfloat16(), weights)
    with pytest.raises(RuntimeError, match=r"diffuse: x0: expected float32 or bfloat16 or float16, got float64"):
        operators.diffuse(x0.double(), weights, ids, 0, 0, 0, 0)


def test_entry_points_by_kernel_and_reference() -> None:
    x0, weights, ids = random("x0", (4, 3, 8)), coefficients(4, "v"), torch.arange(4)
    on, off = (diffuse(x0, weights, 3, 5, ids, kernels=mode) for mode in ("required", "off"))
    for a, b in zip(on, off, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=2e-6)
    strided = x0.transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(diffuse_given(strided, x0, weights), reference(x0, x0, weights), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ConfigError, match="diffuse has no kernel here: float64 has no kernels"):
        diffuse(x0.double(), weights, 3, 5, ids, kernels="required")
    assert not diffuse(x0.requires_grad_(), weights, 3, 5, ids)[0].requires_grad
