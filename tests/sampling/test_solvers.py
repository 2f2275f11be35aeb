"""Solvers against diffusers step by step, and against the exact flow of a mixture: their order of convergence."""

import math
from typing import Any

import pytest
import torch
from sampling_rows.mixture import NARROW

from megadiff.diffusion.schedule import make_schedule
from megadiff.ops.philox import Purpose, normal
from megadiff.sampling.grids import timestep_grid
from megadiff.sampling.sampler import initial_noise
from megadiff.sampling.solvers import SOLVERS, Level, levels_of, make_updates
from tests.sampling.networks import SHAPE, sample, smooth_network

IDS = torch.arange(4)
KINDS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}


@pytest.mark.parametrize("prediction", KINDS)
@pytest.mark.parametrize(("eta", "clip_x0"), [(0.0, False), (0.0, True), (0.7, False), (1.0, True)])
def test_ddim_equals_diffusers(prediction: str, eta: float, clip_x0: bool) -> None:
    """The second method: diffusers' scheduler, given our abar in float64 and our added noise."""
    diffusers = pytest.importorskip("diffusers")
    steps, schedule = 8, make_schedule("scaled_linear", 1000)
    reference = diffusers.DDIMScheduler(
        prediction_type=KINDS[prediction],
        timestep_spacing="trailing",
        clip_sample=clip_x0,
        set_alpha_to_one=True,
    )
    reference.alphas_cumprod = schedule.alpha**2
    reference.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    reference.set_timesteps(steps)
    assert tuple(reference.timesteps.tolist()) == timestep_grid("trailing", schedule, steps)
    x_t = initial_noise(1, IDS, SHAPE, torch.float64)
    for i, t in enumerate(reference.timesteps.tolist()):
        output = smooth_network(x_t, torch.full((4,), t), IDS % 3)
        noise = normal(1, i, IDS, Purpose.SAMPLE, SHAPE, torch.float64)
        settings: dict[str, Any] = {"eta": 0.0 if i == steps - 1 else eta, "use_clipped_model_output": clip_x0}
        x_t = reference.step(output, t, x_t, variance_noise=noise, **settings).prev_sample
    found = sample(smooth_network, schedule, prediction, steps=steps, eta=eta, clip_x0=clip_x0)
    torch.testing.assert_close(found, x_t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("solver", "scheduler", "settings"),
    [
        ("dpmpp_1", "DPMSolverMultistepScheduler", {"solver_order": 1}),
        ("dpmpp_2m", "DPMSolverMultistepScheduler", {"solver_order": 2}),
        ("dpmpp_1_sde", "DPMSolverMultistepScheduler", {"solver_order": 1, "algorithm_type": "sde-dpmsolver++"}),
        ("dpmpp_2m_sde", "DPMSolverMultistepScheduler", {"solver_order": 2, "algorithm_type": "sde-dpmsolver++"}),
        ("dpmpp_2s", "DPMSolverSinglestepScheduler", {"solver_order": 2}),
        ("unipc", "UniPCMultistepScheduler", {"solver_order": 2}),
    ],
)
def test_exponential_solvers_equal_diffusers(solver: str, scheduler: str, settings: dict[str, Any]) -> None:
    """Not of order 3, where the reference gives the second difference half its weight and loses the order."""
    diffusers = pytest.importorskip("diffusers")
    steps, schedule = 20, make_schedule("scaled_linear", 1000)
    timesteps = timestep_grid("trailing", schedule, steps)
    reference = getattr(diffusers, scheduler)(prediction_type="v_prediction", final_sigmas_type="zero", **settings)
    reference.set_timesteps(steps)
    # Ours in float64 in place of its own.
    ratios = (schedule.sigma / schedule.alpha)[list(timesteps)]
    reference.sigmas = torch.cat((ratios, torch.zeros(1, dtype=torch.float64)))
    reference.timesteps = torch.tensor(timesteps)
    x_t = initial_noise(1, IDS, SHAPE, torch.float64)
    for i, t in enumerate(timesteps):
        output = smooth_network(x_t, torch.full((4,), t), IDS % 3)
        noise = normal(1, i, IDS, Purpose.SAMPLE, SHAPE, torch.float64)
        added = {"variance_noise": noise} if solver.endswith("_sde") else {}
        x_t = reference.step(output, torch.tensor(t), x_t, **added).prev_sample
    found = sample(smooth_network, schedule, "v", steps=steps, solver=solver)
    torch.testing.assert_close(found, x_t, rtol=0, atol=2e-6)  # the reference computes in float32


@pytest.mark.parametrize(
    ("solver", "name", "grid", "order"),
    [
        ("ddim", "hybrid", "exponential", 1),
        ("euler", "flow", "trailing", 1),
        ("heun", "flow", "trailing", 2),
        ("dpmpp_1", "hybrid", "exponential", 1),
        ("dpmpp_2m", "hybrid", "exponential", 2),
        ("dpmpp_2s", "hybrid", "exponential", 2),
        ("dpmpp_3m", "hybrid", "exponential", 3),
        ("dpmpp_3s", "hybrid", "exponential", 3),
        ("unipc", "hybrid", "exponential", 3),
    ],
)
def test_errors_fall_with_the_order_of_a_solver(solver: str, name: str, grid: str, order: int) -> None:
    """Of UniPC with its corrector; a fine schedule, because timesteps are whole."""
    schedule = make_schedule(name, 100_000)
    calls = (31, 63) if solver == "heun" else (16, 32)
    coarse, fine = (NARROW.error(solver, schedule, grid, count) for count in calls)
    assert order - 0.5 < math.log2(coarse / fine)
    assert math.log2(coarse / fine) < order + 0.5


@pytest.mark.parametrize("solver", [name for name in SOLVERS if "ddpm" not in name and "sde" not in name])
def test_a_solver_without_noise_keeps_a_constant_picture(solver: str) -> None:
    """With m and noise constant, x = alpha m + sigma noise at every level is exact for every solver."""
    schedule = make_schedule("cosine", 1000)
    levels = levels_of(schedule, timestep_grid("trailing", schedule, 9))
    picture, noise = 0.7, -1.3
    x = last_base = levels[0].alpha * picture + levels[0].sigma * noise
    for update in make_updates(solver, 0.0, levels)[:-1]:
        corrector = update.corrector_weights
        base = corrector[0] * last_base + sum(corrector[1:]) * picture if corrector else x
        x, last_base = update.next_weights[0] * base + sum(update.next_weights[1:]) * picture, base
        reached = levels[update.level + (solver != "heun" or not corrector)]  # Heun goes the same step again
        assert x == pytest.approx(reached.alpha * picture + reached.sigma * noise, abs=1e-9)


def test_a_single_level_ends_at_once() -> None:
    for solver in SOLVERS:
        (update,) = make_updates(solver, 0.0, [Level(0.1, 0.9)])
        assert update.next_weights == (0.0, 1.0, 0.0, 0.0) and not update.corrector_weights and not update.noise
