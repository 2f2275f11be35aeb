"""Dynamic steps: each picture alone, the plain solver where all choose the same, and the end at x0 (B04)."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from megadiff.diffusion.schedule import make_schedule
from megadiff.sampling.dynamic import STEP_RULES, DynamicSampler, StepRule, make_rule
from megadiff.sampling.grids import timestep_grid
from megadiff.sampling.guidance import Guidance, Predict
from megadiff.sampling.sampler import Sampler, initial_noise, make_calls
from megadiff.sampling.spectrum import high_band_share
from tests.sampling.networks import (
    NUM_CLASSES,
    PAIRS,
    SHAPE,
    exact_denoiser,
    sees_text,
    smooth_network,
    true_images,
)

IDS = torch.arange(4)
NEVER_LONG, ALWAYS_LONG = 0.0, math.inf


class Counted:
    """A network that counts the pictures of its calls."""

    def __init__(self, predict: Predict) -> None:
        self.answers = 0
        self.predict = predict

    def __call__(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        self.answers += len(x_t)
        return self.predict(x_t, t, labels)


def run(
    rule: StepRule,
    guidance: Guidance = Guidance(1.0, NUM_CLASSES),  # noqa: B008  # frozen
    ids: Tensor = IDS,
    order: int = 1,
) -> tuple[Tensor, float]:
    """Images of a smooth network, and answers an image."""
    network = Counted(smooth_network)
    sampler = DynamicSampler(make_schedule("cosine", 1000), "v", guidance, rule, order)
    noise = initial_noise(1, ids, SHAPE, torch.float64)
    return sampler(network, noise, ids % NUM_CLASSES, 1, ids), network.answers / len(ids)


def test_noise_has_its_energy_everywhere_and_pictures_do_not() -> None:
    noise = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for deviation in (1.0, 0.01):
        assert float(high_band_share(deviation * noise).mean()) == pytest.approx(1.0, abs=0.02)
    wave = torch.linspace(0, 2 * math.pi, 17)[:16].sin().expand(1, 1, 16, 16)
    assert float(high_band_share(wave)) < 1e-6
    fine = torch.tensor([1.0, -1.0]).repeat(8).expand(1, 1, 16, 16)
    assert float(high_band_share(fine)) > 1.0
    # Sixteen by eight pixels: the same band, by the frequencies of each axis.
    assert float(high_band_share(torch.randn(64, 1, 16, 8)).mean()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("guidance", [Guidance(1.0, NUM_CLASSES), Guidance(3.0, NUM_CLASSES, (0.3, 0.8), 0.5)])
@pytest.mark.parametrize(("order", "solver"), [(1, "ddim"), (2, "dpmpp_2m")])
@pytest.mark.parametrize(("threshold", "stride"), [(NEVER_LONG, 50), (ALWAYS_LONG, 125)])
def test_equal_strides_are_the_plain_solver(
    guidance: Guidance, order: int, solver: str, threshold: float, stride: int
) -> None:
    found, calls = run(StepRule(50, 125, threshold), guidance, order=order)
    schedule = make_schedule("cosine", 1000)
    timesteps = timestep_grid("trailing", schedule, 1000 // stride)
    plain = Sampler(make_calls(schedule, "v", timesteps, solver, guidance), guidance)
    expected = plain(smooth_network, initial_noise(1, IDS, SHAPE, torch.float64), IDS % NUM_CLASSES, 1, IDS)
    doubled = sum(guidance.acts((t + 1) / 1000) for t in timesteps)
    assert calls == 1000 / stride + doubled
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(("name", "zero_end", "prediction"), PAIRS)
def test_b04_an_exact_denoiser_ends_at_x0(name: str, zero_end: bool, prediction: str, order: int) -> None:
    schedule = make_schedule(name, 1000, zero_terminal_snr=zero_end)
    noise = initial_noise(1, IDS, SHAPE, torch.float64)
    for steps, rule in itertools.product((1, 2, 7, 25), STEP_RULES):
        guidance = Guidance(1.0, NUM_CLASSES)
        sampler = DynamicSampler(schedule, prediction, guidance, make_rule(rule, steps, 1000, None), order)
        network = Counted(exact_denoiser(schedule, prediction))
        found = sampler(network, noise, IDS % NUM_CLASSES, 0, IDS)
        torch.testing.assert_close(found, true_images(IDS % NUM_CLASSES, torch.float64), rtol=0, atol=1e-9)
        assert network.answers <= steps * len(IDS)


def test_each_picture_chooses_alone_and_leaves_when_it_is_done() -> None:
    rule = StepRule(20, 100, 0.8)
    together, calls = run(rule)
    alone = [run(rule, ids=one) for one in IDS.split(1)]
    torch.testing.assert_close(together, torch.cat([images for images, _ in alone]), rtol=1e-10, atol=1e-10)
    assert len({count for _, count in alone}) > 1, "they differ in their steps"
    assert calls == pytest.approx(sum(count for _, count in alone) / len(alone))


def test_a_stride_changes_back_only_beyond_the_threshold() -> None:
    """Pictures whose share of the upper band is 0.9, 1.05 and 1.2 times the threshold."""
    noise = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    x_t, share = noise.expand(3, -1, -1, -1), float(high_band_share(noise))
    for factor, from_short, from_long in ((0.9, True, True), (1.05, False, True), (1.2, False, False)):
        rule = StepRule(10, 30, share / factor)
        for was_long, expected in ((False, from_short), (True, from_long)):
            strides, is_long = rule.strides(x_t, x_t, torch.full((3,), 999), torch.full((3,), was_long), 100)
            assert is_long.tolist() == [expected] * 3
            assert strides.tolist() == [30 if expected else 10] * 3


def test_the_last_strides_shrink_with_the_time_that_is_left() -> None:
    """A third of it, at least a quarter of a short stride, and never more than the picture's own stride."""
    t = torch.tensor([999, 299, 298, 59, 29, 4])
    x_t = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)).expand(len(t), -1, -1, -1)
    for threshold, own in ((NEVER_LONG, 40), (ALWAYS_LONG, 100)):
        rule = StepRule(40, 100, threshold, parts_left=3)
        strides, is_long = rule.strides(x_t, x_t, t, torch.zeros(len(t), dtype=torch.bool), 1000)
        assert strides.tolist() == [min(own, left) for left in (334, 100, 100, 20, 10, 10)]
        assert is_long.all() == (own == 100)
    # With two calls left, half of what is left, but no more than a short stride; with none, short ones.
    for calls_left, expected in ((2, [40, 40, 40, 30, 15, 10]), (0, [40, 40, 40, 40, 30, 10])):
        rule = StepRule(40, 100, NEVER_LONG, parts_left=3)
        strides, _ = rule.strides(x_t, x_t, t, torch.zeros(len(t), dtype=torch.bool), calls_left)
        assert strides.tolist() == expected


@pytest.mark.parametrize("threshold", [NEVER_LONG, 0.9, ALWAYS_LONG])
def test_shrinking_strides_take_no_more_calls_than_short_ones(threshold: float) -> None:
    for short in (1000, 500, 334, 77, 40):
        _, calls = run(StepRule(short, 2 * short, threshold, parts_left=3))
        assert calls <= -(-1000 // short)


def test_text_shortens_the_strides() -> None:
    plain, guarded = (StepRule(40, 100, ALWAYS_LONG, detector) for detector in (None, sees_text))
    assert run(plain)[1] == 10 and run(guarded)[1] == 100
    assert make_rule("seed", 50, 1000, sees_text) == StepRule(20, 50, 0.15, sees_text, 10, 1)


def test_the_sampler_asks_the_detector_about_the_predicted_picture() -> None:
    """Text in half of the pictures: only those go slowly."""

    def in_second_half(x0: Tensor) -> Tensor:
        return (x0 - true_images(torch.tensor([1]), x0.dtype)).abs().flatten(1).amax(1) < 1e-6

    schedule = make_schedule("cosine", 1000)
    rule = StepRule(100, 100, NEVER_LONG, in_second_half, guarded=10)
    sampler = DynamicSampler(schedule, "v", Guidance(1.0, NUM_CLASSES), rule, order=1)
    labels = torch.tensor([0, 1, 0, 1])
    network = Counted(exact_denoiser(schedule, "v"))
    sampler(network, initial_noise(1, IDS, SHAPE, torch.float64), labels, 0, IDS)
    assert network.answers == 2 * (10 + 100)
