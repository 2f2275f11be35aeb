"""Steps whose length each picture chooses for itself, by how far it stands out of its noise and what time is left."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.diffusion.prediction import x0_weights
from megadiff.diffusion.schedule import NoiseSchedule
from megadiff.ops.philox import Seed
from megadiff.sampling.guidance import Guidance, Predict, predict_both
from megadiff.sampling.solvers import Level, exponential_step, levels_of
from megadiff.sampling.spectrum import high_band_share
from megadiff.sampling.strokes import Detector

_HYSTERESIS = 1.1


@dataclass(frozen=True)
class StepRule:
    """How far a picture goes in one step.

    It goes in short steps while the mean energy of the upper half of x_t's frequencies, by that of all, is above the
    threshold, and in long ones below. Noise has 1 there at every level of every schedule; a picture that stands out of
    it has less. To change back it must cross the threshold by a tenth. The last steps, which decide fine detail, may
    shrink with the time that is left.

    Attributes:
        short, long: strides in training timesteps.
        threshold: of the ratio.
        detector: of text in the predicted x0, or None.
        guarded: the longest stride where text was found.
        parts_left: a stride is at most one of so many parts of the time that is left, but no less than a quarter of a
            short one, nor than what ends in as many calls as short strides take; 1 does not bound it.
    """

    short: int
    long: int
    threshold: float
    detector: Detector | None = None
    guarded: int = 10
    parts_left: int = 1

    def strides(self, x_t: Tensor, x0: Tensor, t: Tensor, was_long: Tensor, calls_left: int) -> tuple[Tensor, Tensor]:
        """The next stride of each picture, and whether it is a long one without the bounds; (B,) int64 and bool.

        Args:
            x_t, x0: pictures with their noise, and as predicted.
            t: the timesteps of x_t.
            was_long: whether the last stride was a long one.
            calls_left: of as many as short strides take, this one included; writing may take more.
        """
        bound = torch.where(was_long, self.threshold * _HYSTERESIS, self.threshold)
        is_long = high_band_share(x_t) < bound
        strides = torch.where(is_long, self.long, self.short)
        least = _divide_up(t + 1, max(1, calls_left)).clamp(min=self.short // 4, max=self.short)
        strides = torch.minimum(strides, torch.maximum(_divide_up(t + 1, self.parts_left), least))
        if self.detector is not None:
            strides = torch.where(self.detector(x0), strides.clamp(max=self.guarded), strides)
        return strides, is_long


# name -> the threshold, how many times longer long steps are, and the parts of the time left. Errors come from where
# the picture leaves the noise, and from the end. `seed` is as published for 50 steps of 1000.
STEP_RULES = {"spectrum": (0.97, 2.25, 3), "seed": (0.15, 2.5, 1)}


def make_rule(name: str, steps: int, num_train_timesteps: int, detector: Detector | None) -> StepRule:
    """A rule whose short steps are those of an even grid.

    Args:
        name: of STEP_RULES.
        steps: of the grid, so the most that a picture takes.
        num_train_timesteps: T; a picture with text goes at most T / 100 at once.
        detector: of text, or None.
    """
    threshold, longer, parts_left = STEP_RULES[name]
    short = -(-num_train_timesteps // steps)
    guarded = max(1, num_train_timesteps // 100)
    return StepRule(short, round(longer * short), threshold, detector, guarded, parts_left)


@dataclass(frozen=True)
class DynamicSampler:
    """Called as `Sampler` is; pictures that are done leave the batch.

    Attributes:
        schedule, prediction: of the network.
        guidance: weighs the condition.
        rule: how far each picture goes.
        order: 1 for DDIM, 2 for DPM-Solver++(2M).
        clip_x0: clamp every predicted x0 to [-1, 1].
    """

    schedule: NoiseSchedule
    prediction: str
    guidance: Guidance
    rule: StepRule
    order: int
    clip_x0: bool = False

    @torch.no_grad()
    def __call__(self, predict: Predict, noise: Tensor, labels: Tensor, seed: Seed, image_ids: Tensor) -> Tensor:
        """Turn noise into images; the last call ends exactly at the predicted x0. `seed` and ids play no part."""
        last = self.schedule.num_train_timesteps - 1
        to_x0 = torch.stack(x0_weights(self.prediction, self.schedule.alpha, self.schedule.sigma), dim=1)
        levels = levels_of(self.schedule, range(last + 1))
        result = torch.empty_like(noise)
        rows = torch.arange(len(noise), device=noise.device)  # of the pictures that go on
        x_t, before = noise, noise  # and the prediction of the last step
        t, t_before = torch.full_like(rows, last), torch.full_like(rows, last)
        was_long = torch.zeros_like(rows, dtype=torch.bool)
        calls_left = -(-len(levels) // self.rule.short)
        while len(rows):
            to_m = _columns(to_x0[t.cpu()], x_t)
            m = to_m[0] * x_t + to_m[1] * self._answer(predict, x_t, t, labels)
            if self.clip_x0:
                m = m.clamp(-1, 1)
            strides, was_long = self.rule.strides(x_t, m, t, was_long, calls_left)
            calls_left -= 1
            following = t - strides
            weights = _columns(self._weights(levels, t_before, t, following), x_t)
            x_next = weights[0] * x_t + weights[1] * m + weights[2] * before
            is_done = following < 0
            result[rows[is_done]] = x_next[is_done]
            goes_on = ~is_done
            rows, labels, was_long = rows[goes_on], labels[goes_on], was_long[goes_on]
            x_t, before, t_before, t = x_next[goes_on], m[goes_on], t[goes_on], following[goes_on]
        return result

    def _answer(self, predict: Predict, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        channels, total = x_t.shape[1], self.schedule.num_train_timesteps
        acts = [self.guidance.acts((step + 1) / total) for step in t.tolist()]
        if not any(acts):
            return predict(x_t, t, labels)[:, :channels].to(x_t.dtype)
        both = predict_both(predict, x_t, t, labels, self.guidance.num_classes)[:, :channels].to(x_t.dtype)
        return torch.where(
            torch.tensor(acts, device=x_t.device).view(-1, 1, 1, 1),
            self.guidance.weigh(both, channels),
            both.chunk(2)[0],
        )

    def _weights(self, levels: Sequence[Level], before: Tensor, now: Tensor, following: Tensor) -> Tensor:
        """Weights of x_t, this prediction and the last one in the next x_t; (B, 3) float64 on the CPU."""
        triples = list(zip(before.tolist(), now.tolist(), following.tolist(), strict=True))
        known = {triple: self._step(levels, *triple) for triple in set(triples)}
        return torch.tensor([known[triple] for triple in triples], dtype=torch.float64)

    def _step(self, levels: Sequence[Level], before: int, now: int, following: int) -> tuple[float, float, float]:
        if following < 0:
            return 0.0, 1.0, 0.0
        nodes = [levels[now]]
        if self.order == 2 and before > now and levels[before].alpha > 0:
            nodes.append(levels[before])
        kept, weights, _ = exponential_step(levels[now], levels[following], nodes, stochastic=False)
        return kept, weights[0], weights[1] if len(weights) > 1 else 0.0


def _divide_up(values: Tensor, by: int) -> Tensor:
    return (values + by - 1) // by


def _columns(values: Tensor, like: Tensor) -> list[Tensor]:
    """The columns of (B, K), each as (B, 1, 1, 1) in the dtype and on the device of `like`."""
    return [column.to(like.device, like.dtype).view(-1, 1, 1, 1) for column in values.unbind(1)]
