"""Philox against the published vectors and against a second implementation in plain Python integers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megadiff.ops.philox import (
    Purpose,
    integers,
    normal,
    permutation,
    philox_4x32,
    random_bits,
    uniform,
)

WORD = st.integers(0, 2**32 - 1)
FULL = 0xFFFFFFFF


def philox_in_python(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's round written with unbounded integers."""
    x0, x1, x2, x3 = counter
    for i in range(10):
        k0, k1 = (key[0] + i * 0x9E3779B9) % 2**32, (key[1] + i * 0xBB67AE85) % 2**32
        high_a, low_a = divmod(0xD2511F53 * x0, 2**32)
        high_b, low_b = divmod(0xCD9E8D57 * x2, 2**32)
        x0, x1, x2, x3 = high_b ^ x1 ^ k0, low_b, high_a ^ x3 ^ k1, low_a
    return x0, x1, x2, x3


def encrypt(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    return tuple(int(word) for word in philox_4x32((c0, c1, c2, c3), key))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_random123_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert encrypt(counter, key) == expected
    assert philox_in_python(counter, key) == expected


@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.tuples(WORD, WORD))
def test_cipher_equals_python_integers(counter: tuple[int, ...], key: tuple[int, int]) -> None:
    assert encrypt(counter, key) == philox_in_python(counter, key)


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**64 - 1),
    step=WORD,
    ids=st.lists(st.integers(0, 2**56 - 1), min_size=1, max_size=4),
    purpose=st.sampled_from(Purpose),
    count=st.integers(0, 11),
)
def test_counter_layout_is_the_one_of_the_design(
    seed: int, step: int, ids: list[int], purpose: Purpose, count: int
) -> None:
    words = random_bits(seed, step, torch.tensor(ids), purpose, count)
    assert words.shape == (len(ids), count)
    for row, sample_id in zip(words.tolist(), ids, strict=True):
        for element, word in enumerate(row):
            counter = (element // 4, sample_id % 2**32, step, purpose << 24 | sample_id >> 32)
            assert word == philox_in_python(counter, (seed % 2**32, seed >> 32))[element % 4]


@given(words=st.integers(0, 2**20), count=st.integers(1, 9))
def test_normals_are_box_muller_of_consecutive_words(words: int, count: int) -> None:
    ids = torch.tensor([words])
    bits = random_bits(5, 2, ids, Purpose.NOISE, count + 1)[0].tolist()
    normals = normal(5, 2, ids, Purpose.NOISE, (count,), torch.float64)[0].tolist()
    for element, value in enumerate(normals):
        first, second = bits[element - element % 2], bits[element - element % 2 + 1]
        radius = math.sqrt(-2.0 * math.log((first + 0.5) / 2**32))
        wave = math.sin if element % 2 else math.cos
        assert value == pytest.approx(radius * wave(2.0 * math.pi * second / 2**32), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 5), (3, 16, 16)])
def test_a_sample_gets_the_same_numbers_in_any_batch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ids = torch.tensor([7, 2**33 + 7, 0, 123456789, 2**55])
    together = normal(3, 11, ids, Purpose.NOISE, shape, dtype)
    assert together.shape == (5, *shape) and together.dtype == dtype
    backwards = normal(3, 11, ids.flip(0), Purpose.NOISE, shape, dtype).flip(0)
    alone = torch.cat([normal(3, 11, ids[i : i + 1], Purpose.NOISE, shape, dtype) for i in range(5)])
    # A vectorised log or cos may round the tail of a tensor differently: a few units in the last place.
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(backwards, together, rtol=0, atol=tolerance)
    torch.testing.assert_close(alone, together, rtol=0, atol=tolerance)
    assert len(together.reshape(5, -1)[:, 0].unique()) == 5


def test_precisions_see_the_same_noise() -> None:
    ids = torch.arange(16)
    exact = normal(0, 0, ids, Purpose.NOISE, (3, 16, 16), torch.float64)
    single = normal(0, 0, ids, Purpose.NOISE, (3, 16, 16), torch.float32)
    half = normal(0, 0, ids, Purpose.NOISE, (3, 16, 16), torch.bfloat16)
    # Near radius 0 the rounding of the uniform number (2**-25) passes through a square root.
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=4e-4)
    assert (single.double() - exact).abs().mean() < 2e-7
    assert torch.equal(half, single.bfloat16())


def test_streams_do_not_repeat() -> None:
    ids = torch.arange(64)
    streams = [random_bits(seed, step, ids, p, 8) for seed in (0, 2**32) for step in (0, 1) for p in Purpose]
    words = torch.cat([s.flatten() for s in streams])
    # 16,384 draws from 2**32: three or more collisions have probability below 1e-5.
    assert len(words) - len(words.unique()) <= 2


def test_normals_have_the_moments_of_a_gaussian() -> None:
    values = normal(1, 0, torch.arange(256), Purpose.NOISE, (1024,), torch.float64)
    error = 1.0 / math.sqrt(values.numel())
    for power, moment, spread in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)]:
        assert abs(float((values**power).mean()) - moment) < 5.0 * math.sqrt(spread) * error
    pairs = values.view(-1, 2)
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean())) < 5.0 * math.sqrt(2.0) * error


def test_uniform_stays_below_one_and_agrees_between_precisions() -> None:
    ids = torch.arange(512)
    exact = uniform(9, 4, ids, Purpose.CONDITION, (64,), torch.float64)
    single = uniform(9, 4, ids, Purpose.CONDITION, (64,))
    assert float(exact.min()) >= 0.0 and float(exact.max()) < 1.0 and float(single.max()) < 1.0
    assert float((exact - single.double()).abs().max()) < 2.0**-24
    assert abs(float(exact.mean()) - 0.5) < 5.0 / math.sqrt(12.0 * exact.numel())
    assert uniform(9, 4, ids, Purpose.CONDITION).shape == (512,)


@given(high=st.integers(1, 2**31), seed=st.integers(0, 2**63))
def test_integers_are_the_scaled_words(high: int, seed: int) -> None:
    ids = torch.arange(8)
    words = random_bits(seed, 1, ids, Purpose.TIMESTEP, 1)[:, 0]
    expected = [word * high // 2**32 for word in words.tolist()]
    assert integers(seed, 1, ids, Purpose.TIMESTEP, high).tolist() == expected


def test_integers_are_uniform() -> None:
    counts = integers(0, 0, torch.arange(20000), Purpose.TIMESTEP, 10).bincount(minlength=10)
    chi_square = float(((counts - 2000.0) ** 2 / 2000.0).sum())
    assert chi_square < 33.7  # the 0.9999 quantile with 9 degrees of freedom


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**32 - 1), n=st.integers(0, 200))
def test_permutation_is_complete_and_repeatable(seed: int, epoch: int, n: int) -> None:
    order = permutation(seed, epoch, n)
    assert sorted(order.tolist()) == list(range(n))
    assert torch.equal(order, permutation(seed, epoch, n))


def test_permutation_reaches_every_order_and_changes_with_the_epoch() -> None:
    orders = {tuple(permutation(0, epoch, 4).tolist()) for epoch in range(400)}
    assert len(orders) == 24
    assert not torch.equal(permutation(0, 0, 100), permutation(1, 0, 100))


@pytest.mark.parametrize(("seed", "step", "count"), [(-1, 0, 1), (2**64, 0, 1), (0, -1, 1), (0, 2**32, 1)])
def test_out_of_range_arguments_are_refused(seed: int, step: int, count: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        random_bits(seed, step, torch.zeros(1, dtype=torch.int64), Purpose.NOISE, count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_integers() -> None:
    ids = torch.arange(33)
    on_cpu, on_cuda = (random_bits(1, 2, ids.to(d), Purpose.NOISE, 103) for d in ("cpu", "cuda"))
    assert torch.equal(on_cuda.cpu(), on_cpu)
    normals = [normal(1, 2, ids.to(d), Purpose.NOISE, (103,)).cpu() for d in ("cpu", "cuda")]
    torch.testing.assert_close(normals[0], normals[1], rtol=0, atol=1e-5)


def test_every_sample_may_have_its_own_seed() -> None:
    """The numbers are those of each seed alone; seeds above 32 bits use the key's high word."""
    seeds, ids = torch.tensor([3, 2**40 + 5, 3, 2**63 - 1]), torch.tensor([1, 0, 2**33, 7])
    found = normal(seeds, 2, ids, Purpose.INITIAL, (3, 3), torch.float64)
    for i, seed in enumerate(seeds.tolist()):
        assert torch.equal(found[i : i + 1], normal(seed, 2, ids[i : i + 1], Purpose.INITIAL, (3, 3), torch.float64))
