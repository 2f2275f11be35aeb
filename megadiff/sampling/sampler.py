"""From noise to images: the loop that every solver shares."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.diffusion.prediction import x0_weights
from megadiff.diffusion.schedule import NoiseSchedule, schedule_of
from megadiff.ops import philox
from megadiff.ops.library import Kernels
from megadiff.ops.philox import Purpose, Seed
from megadiff.ops.solver_step import solver_step
from megadiff.sampling.dynamic import DynamicSampler, make_rule
from megadiff.sampling.grids import timestep_grid
from megadiff.sampling.guidance import Guidance, Predict, predict_both
from megadiff.sampling.solvers import Update, levels_of, make_updates
from megadiff.sampling.strokes import load_detector


def initial_noise(seed: Seed, image_ids: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (B, *shape) noise to start from: an image of a seed starts alike in any batch and layout."""
    return philox.normal(seed, 0, image_ids, Purpose.INITIAL, shape, dtype)


@dataclass(frozen=True)
class Call:
    """What a call of the network and the update after it need: numbers of the host, so that nothing waits for a device.

    Attributes:
        timestep: of training, at which the network is called.
        to_m: weights of x_t and the answer in the predicted x0.
        update: of the state.
        is_guided: whether the answer without the condition is wanted.
    """

    timestep: int
    to_m: tuple[float, float]
    update: Update
    is_guided: bool


@dataclass(frozen=True)
class Sampler:
    """A solver on the levels of a grid, with guidance.

    Attributes:
        calls: of the network, in order.
        guidance: weighs the condition.
        clip_x0: clamp every predicted x0 to [-1, 1] (pixels, not latents).
        kernels: whether the fused kernel of the update may run.
    """

    calls: tuple[Call, ...]
    guidance: Guidance
    clip_x0: bool = False
    kernels: Kernels = "auto"

    @torch.no_grad()
    def __call__(self, predict: Predict, noise: Tensor, labels: Tensor, seed: Seed, image_ids: Tensor) -> Tensor:
        """Turn noise into images; the last call ends exactly at the predicted x0.

        Args:
            predict: the network; called with a doubled batch where guidance acts. Only the first C channels of its
                output are used.
            noise: (B, C, H, W), see initial_noise; its dtype is the one of the arithmetic.
            labels: conditions, (B,) int64 or (B, F) float, see `megadiff.diffusion.condition`.
            seed: of the noise that solvers of the SDE add, one or one for each image.
            image_ids: (B,) int64, which make that noise independent of the batch.

        Returns:
            (B, C, H, W) images in the dtype of `noise`.
        """
        # base, m of the last call and of the one before
        x_t, last_base, h1, h2 = noise, None, None, None
        has_memory = any(any(call.update.next_weights[2:] + call.update.corrector_weights[1:]) for call in self.calls)
        for call in self.calls:
            weights, corrector = call.update.next_weights, call.update.corrector_weights
            output, scale = self._answer(call, predict, x_t, labels)
            fresh = _fresh_noise(call.update, seed, image_ids, noise)
            following, m, base = solver_step(
                output.to(x_t.dtype),
                x_t,
                to_m=call.to_m,
                next_weights=(*weights, 0.0 if fresh is None else 1.0),
                guidance=scale,
                clip=1.0 if self.clip_x0 else 0.0,
                h1=h1 if weights[2] or any(corrector[1:2]) else None,
                h2=h2 if weights[3] or any(corrector[2:3]) else None,
                noise=fresh,
                x_last=last_base if corrector else None,
                corrector_weights=corrector,
                keep_m=has_memory,
                kernels=self.kernels,
            )
            last_base = base if corrector else x_t
            x_t, h1, h2 = following, m, h1
        return x_t

    def _answer(self, call: Call, predict: Predict, x_t: Tensor, labels: Tensor) -> tuple[Tensor, float | None]:
        """The network's answer, and the scale that is still to be applied to its two halves."""
        t = torch.full((len(x_t),), call.timestep, dtype=torch.int64, device=x_t.device)
        if not call.is_guided:
            return predict(x_t, t, labels), None
        both = predict_both(predict, x_t, t, labels, self.guidance.num_classes)
        if self.guidance.rescale:
            return self.guidance.weigh(both, x_t.shape[1]), None
        return both, self.guidance.scale


def sampler_of(config: Config) -> Sampler | DynamicSampler:
    """The sampler of a run's settings.

    Raises:
        ConfigError: too many steps, a prediction that cannot be inverted on this schedule, or a text guard that is not
            there.
    """
    sampling, schedule = config.sampling, schedule_of(config)
    if sampling.dynamic_steps != "none":
        return _dynamic_sampler(config, schedule)
    timesteps = timestep_grid(sampling.timestep_spacing, schedule, sampling.steps, sampling.flow_shift)
    guidance = _guidance_of(config)
    calls = make_calls(schedule, config.diffusion.prediction, timesteps, sampling.solver, guidance, sampling.eta)
    return Sampler(calls, guidance, sampling.clip_x0, config.train.kernels)


def _dynamic_sampler(config: Config, schedule: NoiseSchedule) -> DynamicSampler:
    sampling = config.sampling
    detector = None if sampling.text_guard == "none" else load_detector(sampling.text_guard)
    rule = make_rule(sampling.dynamic_steps, sampling.steps, schedule.num_train_timesteps, detector)
    order = 2 if sampling.solver == "dpmpp_2m" else 1
    guidance = _guidance_of(config)
    return DynamicSampler(schedule, config.diffusion.prediction, guidance, rule, order, sampling.clip_x0)


def _guidance_of(config: Config) -> Guidance:
    sampling = config.sampling
    return Guidance(sampling.guidance, config.model.num_classes, sampling.guidance_interval, sampling.guidance_rescale)


def make_calls(
    schedule: NoiseSchedule,
    prediction: str,
    timesteps: tuple[int, ...],
    solver: str,
    guidance: Guidance,
    eta: float = 0.0,
) -> tuple[Call, ...]:
    """All calls of a solver on a grid of falling timesteps.

    Raises:
        ConfigError: a prediction that cannot be inverted on this schedule.
    """
    of_x_t, of_output = (values.tolist() for values in x0_weights(prediction, schedule.alpha, schedule.sigma))
    calls = []
    for update in make_updates(solver, eta, levels_of(schedule, timesteps)):
        t = timesteps[update.level]
        time = (t + 1) / schedule.num_train_timesteps
        calls.append(Call(t, (of_x_t[t], of_output[t]), update, guidance.acts(time)))
    return tuple(calls)


def _fresh_noise(update: Update, seed: Seed, image_ids: Tensor, like: Tensor) -> Tensor | None:
    """The sum of the draws that an update adds."""
    shape = tuple(like.shape[1:])
    draws = [
        weight * philox.normal(seed, draw, image_ids, Purpose.SAMPLE, shape, like.dtype)
        for draw, weight in update.noise
    ]
    return sum(draws[1:], start=draws[0]) if draws else None
