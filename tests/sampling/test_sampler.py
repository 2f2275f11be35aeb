"""Sampling ends exactly at x0 (B04), refuses what it cannot invert (B03), and does not depend on the batch."""

import itertools

import pytest
import torch
from torch import Tensor

from megadiff.diffusion.schedule import NoiseSchedule, make_schedule
from megadiff.errors import ConfigError
from megadiff.sampling.grids import GRIDS
from megadiff.sampling.solvers import SOLVERS
from tests.sampling.networks import PAIRS, exact_denoiser, sample, smooth_network, true_images

STOCHASTIC = [name for name in SOLVERS if name == "ddpm" or name.endswith("_sde")]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("name", "zero_end", "prediction"), PAIRS)
def test_b04_an_exact_denoiser_ends_at_x0(name: str, zero_end: bool, prediction: str, solver: str) -> None:
    """Every solver on every schedule with every prediction."""
    schedule = make_schedule(name, 1000, zero_terminal_snr=zero_end)
    predict = exact_denoiser(schedule, prediction)
    expected = true_images(torch.arange(4) % 3, torch.float64)
    for grid, steps, clip_x0 in zip(GRIDS, (1, 2, 3, 8, 21), itertools.cycle((False, True)), strict=False):
        found = sample(
            predict, schedule, prediction, steps=steps, spacing=grid, clip_x0=clip_x0, solver=solver, shift=2.0
        )
        # At the noisiest cosine timestep (alpha = 5e-5) rounding of float64 grows by 1 / alpha.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_b04_float32_ends_at_x0_on_every_grid_for_every_step_count(solver: str, grid: str) -> None:
    schedule = make_schedule("cosine", 1000)
    expected = true_images(torch.arange(4) % 3, torch.float32)
    for steps in range(1, 26):
        predict = exact_denoiser(schedule, "v")
        found = sample(predict, schedule, dtype=torch.float32, steps=steps, spacing=grid, solver=solver)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
def test_b04_the_result_is_the_last_predicted_x0_bit_for_bit(solver: str) -> None:
    outputs: list[Tensor] = []

    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        outputs.append(smooth_network(x_t, t, labels))
        return outputs[-1]

    found = sample(predict, make_schedule("cosine", 1000), "x0", steps=7, solver=solver)
    assert len(outputs) == (13 if solver == "heun" else 7) and torch.equal(found, outputs[-1])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("clip_x0", [False, True])
def test_b03_eps_with_pure_noise_is_refused_even_under_clipping(clip_x0: bool, solver: str) -> None:
    tables = make_schedule("scaled_linear", 10)
    schedule = NoiseSchedule(tables.alpha.clone(), tables.sigma.clone())
    schedule.alpha[-1], schedule.sigma[-1] = 0.0, 1.0

    def never_called(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        raise AssertionError("the network ran before the settings were checked")

    with pytest.raises(ConfigError, match=r"prediction = eps .*alpha = 0"):
        sample(never_called, schedule, "eps", clip_x0=clip_x0, solver=solver)
    assert bool(sample(smooth_network, schedule, "v", clip_x0=clip_x0, solver=solver).isfinite().all())


@pytest.mark.parametrize("solver", SOLVERS)
def test_gaussian_data_is_sampled_with_its_variance(solver: str) -> None:
    """For x0 ~ N(0, s^2) the ideal denoiser is known, and enough steps must reproduce s."""
    std = 0.5
    steps, spacing = (100, "exponential") if solver.startswith(("dpmpp_2", "dpmpp_3", "unipc")) else (1000, "trailing")
    schedule = make_schedule("linear", 1000)

    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        alpha, sigma = schedule.at(t, x_t)
        return x_t * alpha * std**2 / (alpha**2 * std**2 + sigma**2)

    found = sample(predict, schedule, "x0", num=1000, steps=steps, solver=solver, spacing=spacing)
    # Four standard errors of 18,000 values; the last of 1000 steps leaves half a percent of bias.
    assert float(found.std()) == pytest.approx(std, rel=0.025)
    assert abs(float(found.mean())) < 0.02


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_image_is_the_same_in_any_batch(solver: str) -> None:
    schedule = make_schedule("cosine", 100)
    ids = torch.tensor([5, 0, 17, 2**40])
    together = sample(smooth_network, schedule, ids=ids, steps=6, guidance=2.0, solver=solver)
    alone = [
        sample(smooth_network, schedule, ids=ids[i : i + 1], steps=6, guidance=2.0, solver=solver) for i in range(4)
    ]
    torch.testing.assert_close(torch.cat(alone), together, rtol=0, atol=1e-10)
    assert float((together[0] - together[2]).abs().max()) > 0.1


@pytest.mark.parametrize("solver", SOLVERS)
def test_only_solvers_of_the_sde_add_noise(solver: str) -> None:
    schedule = make_schedule("cosine", 100)
    one, other = (sample(smooth_network, schedule, solver=solver, seed=seed) for seed in (1, 2))
    assert torch.equal(one, other) == (solver not in STOCHASTIC)


def test_eta_adds_noise_to_ddim() -> None:
    schedule = make_schedule("cosine", 100)
    plain, half, whole = (sample(smooth_network, schedule, eta=eta) for eta in (0.0, 0.5, 1.0))
    assert not torch.equal(plain, half) and not torch.equal(half, whole)
    assert torch.equal(whole, sample(smooth_network, schedule, solver="ddpm"))
    assert not torch.equal(whole, sample(smooth_network, schedule, eta=1.0, seed=2))


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
