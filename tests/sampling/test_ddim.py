"""DDIM ends exactly at x0 (B04), refuses what it cannot invert (B03), and equals diffusers step by step."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megadiff.diffusion.prediction import target
from megadiff.diffusion.schedule import SCHEDULES, NoiseSchedule, make_schedule
from megadiff.errors import ConfigError
from megadiff.ops.philox import Purpose, normal
from megadiff.sampling.ddim import ddim_sample, initial_noise, sampling_timesteps
from megadiff.sampling.guidance import Predict

SHAPE = (2, 3, 3)


def sample(
    predict: Predict,
    schedule: NoiseSchedule,
    prediction: str = "v",
    num: int = 4,
    dtype: torch.dtype = torch.float64,
    ids: Tensor | None = None,
    steps: int = 5,
    guidance: float = 1.0,
    eta: float = 0.0,
    clip_x0: bool = False,
) -> Tensor:
    image_ids = torch.arange(num) if ids is None else ids
    noise = initial_noise(1, image_ids, SHAPE, dtype)
    labels = image_ids % 3
    return ddim_sample(predict, schedule, prediction, noise, labels, 3, steps, guidance, eta, clip_x0, 1, image_ids)


def true_images(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """One fixed picture a label."""
    pictures = torch.linspace(-1.0, 1.0, 4 * math.prod(SHAPE), dtype=torch.float64).view(4, *SHAPE)
    return pictures[labels].to(dtype)


def exact_denoiser(schedule: NoiseSchedule, prediction: str) -> Predict:
    """The answer of a network that knows the picture of every label."""

    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        x0 = true_images(labels, x_t.dtype)
        alpha, sigma = schedule.at(t, x_t)
        return target(prediction, x0, (x_t - alpha * x0) / sigma, alpha, sigma)

    return predict


def smooth_network(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """Some nonlinear function of each sample alone."""
    return (x_t + 0.3 * labels.view(-1, 1, 1, 1)).sin() * (1.0 + t.view(-1, 1, 1, 1) / 1000.0)


@given(num=st.integers(1, 1200), data=st.data())
def test_timesteps_fall_from_the_last_one_without_repeats(num: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, num))
    timesteps = sampling_timesteps(num, steps)
    assert len(timesteps) == steps and timesteps[0] == num - 1 and timesteps[-1] >= 0
    gaps = [a - b for a, b in itertools.pairwise(timesteps)]
    assert all(gap >= 1 for gap in gaps)
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_timesteps_of_the_usual_settings() -> None:
    assert sampling_timesteps(1000, 4) == (999, 749, 499, 249)
    assert sampling_timesteps(1000, 3) == (999, 666, 332)
    assert sampling_timesteps(5, 5) == (4, 3, 2, 1, 0)
    with pytest.raises(ConfigError, match=r"sampling\.steps = 11 .*num_train_timesteps = 10"):
        sampling_timesteps(10, 11)
    with pytest.raises(ConfigError, match=r"sampling\.steps = 0"):
        sampling_timesteps(10, 0)


# Every schedule, with and without pure noise at its end, and every prediction that says something there.
PAIRS = [
    (name, zero_end, prediction)
    for name, zero_end in [
        *((name, False) for name in SCHEDULES),
        *((name, True) for name in SCHEDULES if name != "flow"),
    ]
    for prediction in ("eps", "x0", "v", "flow")
    if prediction != "eps" or not (zero_end or name == "flow")
]


@pytest.mark.parametrize(("name", "zero_end", "prediction"), PAIRS)
def test_b04_an_exact_denoiser_ends_at_x0_for_every_step_count(name: str, zero_end: bool, prediction: str) -> None:
    schedule = make_schedule(name, 1000, zero_terminal_snr=zero_end)
    predict = exact_denoiser(schedule, prediction)
    expected = true_images(torch.arange(4) % 3, torch.float64)
    settings = ((0.0, False), (0.6, True), (1.0, False))
    for steps, (eta, clip_x0) in itertools.product(range(1, 26), settings):
        found = sample(predict, schedule, prediction, steps=steps, eta=eta, clip_x0=clip_x0)
        # At the noisiest cosine timestep (alpha = 5e-5) rounding of float64 grows by 1 / alpha.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_b04_float32_ends_at_x0_too() -> None:
    schedule = make_schedule("cosine", 1000)
    expected = true_images(torch.arange(4) % 3, torch.float32)
    for steps in range(1, 26):
        found = sample(exact_denoiser(schedule, "v"), schedule, dtype=torch.float32, steps=steps, eta=1.0)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_b04_the_result_is_the_last_predicted_x0_bit_for_bit(eta: float) -> None:
    outputs: list[Tensor] = []

    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        outputs.append(smooth_network(x_t, t, labels))
        return outputs[-1]

    found = sample(predict, make_schedule("cosine", 1000), "x0", steps=7, eta=eta)
    assert len(outputs) == 7 and torch.equal(found, outputs[-1])


@pytest.mark.parametrize("clip_x0", [False, True])
def test_b03_eps_with_pure_noise_is_refused_even_under_clipping(clip_x0: bool) -> None:
    tables = make_schedule("scaled_linear", 10)
    schedule = NoiseSchedule(tables.alpha.clone(), tables.sigma.clone())
    schedule.alpha[-1], schedule.sigma[-1] = 0.0, 1.0

    def never_called(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        raise AssertionError("the network ran before the settings were checked")

    with pytest.raises(ConfigError, match=r"prediction = eps .*alpha = 0"):
        sample(never_called, schedule, "eps", clip_x0=clip_x0)
    assert bool(sample(smooth_network, schedule, "v", clip_x0=clip_x0).isfinite().all())


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
@pytest.mark.parametrize(("eta", "clip_x0"), [(0.0, False), (0.0, True), (0.7, False), (1.0, True)])
def test_trajectory_equals_diffusers(prediction: str, eta: float, clip_x0: bool) -> None:
    """The second method: diffusers' DDIMScheduler, given our abar in float64 and our added noise."""
    diffusers = pytest.importorskip("diffusers")
    steps, schedule = 8, make_schedule("scaled_linear", 1000)
    kinds = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
    reference = diffusers.DDIMScheduler(
        prediction_type=kinds[prediction],
        timestep_spacing="trailing",
        clip_sample=clip_x0,
        set_alpha_to_one=True,
    )
    reference.alphas_cumprod = schedule.alpha**2
    reference.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    reference.set_timesteps(steps)
    assert tuple(reference.timesteps.tolist()) == sampling_timesteps(1000, steps)
    ids = torch.arange(4)
    x_t = initial_noise(1, ids, SHAPE, torch.float64)
    for i, t in enumerate(reference.timesteps.tolist()):
        output = smooth_network(x_t, torch.full((4,), t), ids % 3)
        noise = normal(1, i, ids, Purpose.SAMPLE, SHAPE, torch.float64)
        is_last = i == steps - 1
        x_t = reference.step(
            output,
            t,
            x_t,
            eta=0.0 if is_last else eta,
            use_clipped_model_output=clip_x0,
            variance_noise=noise,
        ).prev_sample
    found = sample(smooth_network, schedule, prediction, steps=steps, eta=eta, clip_x0=clip_x0)
    torch.testing.assert_close(found, x_t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_gaussian_data_is_sampled_with_its_variance(eta: float) -> None:
    """For x0 ~ N(0, s^2) the ideal denoiser is known, and many steps must reproduce s."""
    std = 0.5
    schedule = make_schedule("linear", 1000)

    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        alpha, sigma = schedule.at(t, x_t)
        return x_t * alpha * std**2 / (alpha**2 * std**2 + sigma**2)

    found = sample(predict, schedule, "x0", num=1000, steps=1000, eta=eta)
    # Four standard errors of 18,000 values; the last of 1000 steps leaves half a percent of bias.
    assert float(found.std()) == pytest.approx(std, rel=0.025)
    assert abs(float(found.mean())) < 0.02


def test_an_image_is_the_same_in_any_batch() -> None:
    schedule = make_schedule("cosine", 100)
    ids = torch.tensor([5, 0, 17, 2**40])
    together = sample(smooth_network, schedule, ids=ids, steps=6, guidance=2.0, eta=1.0)
    alone = [sample(smooth_network, schedule, ids=ids[i : i + 1], steps=6, guidance=2.0, eta=1.0) for i in range(4)]
    torch.testing.assert_close(torch.cat(alone), together, rtol=0, atol=1e-10)
    assert float((together[0] - together[2]).abs().max()) > 0.1


def test_eta_adds_other_noise_for_every_seed_and_image() -> None:
    schedule = make_schedule("cosine", 100)
    noise, labels, ids = torch.zeros(2, *SHAPE), torch.zeros(2, dtype=torch.int64), torch.arange(2)

    def run(eta: float, seed: int) -> Tensor:
        return ddim_sample(smooth_network, schedule, "v", noise, labels, 3, 5, 1.0, eta, False, seed, ids)

    assert torch.equal(run(0.0, 1), run(0.0, 2))
    noisy = run(1.0, 1)
    assert not torch.equal(noisy[0], noisy[1]) and not torch.equal(noisy, run(1.0, 2))


def test_learn_sigma_outputs_and_low_precision_networks_are_taken() -> None:
    schedule = make_schedule("cosine", 100)

    def doubled(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        output = smooth_network(x_t, t, labels)
        return torch.cat((output, torch.full_like(output, float("nan"))), dim=1)

    expected = sample(smooth_network, schedule, guidance=3.0)
    assert torch.equal(sample(doubled, schedule, guidance=3.0), expected)

    def half(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        return smooth_network(x_t, t, labels).bfloat16()

    found = sample(half, schedule, dtype=torch.float32, guidance=3.0)
    assert found.dtype == torch.float32 and not found.requires_grad


def test_no_graph_is_kept() -> None:
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    found = sample(lambda x_t, t, labels: weight * x_t, make_schedule("cosine", 10))
    assert not found.requires_grad
