"""Guidance: one doubled call, one definition of the null class (B05), one answer for every prediction."""

import itertools

import pytest
import torch
from torch import Tensor

from megadiff.config.schema import DiffusionConfig
from megadiff.diffusion.objective import DiffusionObjective
from megadiff.diffusion.prediction import convert
from megadiff.diffusion.schedule import make_schedule
from megadiff.ops.solver_step import solver_step
from megadiff.sampling.guidance import Guidance, Predict, predict_both
from megadiff.sampling.sampler import Sampler, make_calls

NUM_CLASSES = 5


class Recorder:
    """A network whose output depends on x_t, t and label of each sample; it keeps its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        self.calls.append((x_t, t, labels))
        return x_t.sin() + (t * 10 + labels).view(-1, 1, 1, 1)


def guided(network: Predict, guidance: float, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """The guided answer, as the sampler's update computes it."""
    both = predict_both(network, x_t, t, labels, NUM_CLASSES)
    return solver_step(both, x_t, to_m=(0, 1), next_weights=(0, 1, 0, 0, 0), guidance=guidance)[1]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    x_t = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x_t, torch.tensor([4, 4, 4]), torch.tensor([0, 4, 2])


def test_b05_training_and_sampling_share_one_empty_condition() -> None:
    """The labels of a batch with dropout 1 are those of the sampler's unconditional half."""
    config = DiffusionConfig(num_train_timesteps=10, condition_dropout=1.0)
    objective = DiffusionObjective(make_schedule("cosine", 10), config, NUM_CLASSES, seed=0)
    x_t, t, labels = batch()
    trained = objective.prepare(x_t, labels, torch.arange(3), step=0).labels
    network = Recorder()
    guided(network, 3.0, x_t, t, labels)
    sampled = network.calls[0][2]
    assert torch.equal(sampled[:3], labels)
    assert torch.equal(sampled[3:], trained)
    # The label embedding has num_classes + 1 rows, and no class shares the last one.
    assert trained.tolist() == [NUM_CLASSES] * 3


@pytest.mark.parametrize("guidance", [0.0, 0.5, 2.0, 7.5])
def test_guidance_extrapolates_in_one_doubled_call(guidance: float) -> None:
    x_t, t, labels = batch()
    network = Recorder()
    output = guided(network, guidance, x_t, t, labels)
    assert len(network.calls) == 1 and len(network.calls[0][0]) == 6
    conditional, null = network(x_t, t, labels), network(x_t, t, torch.full((3,), NUM_CLASSES))
    torch.testing.assert_close(output, null + guidance * (conditional - null), rtol=1e-12, atol=1e-12)


def calls_of(guidance: Guidance, prediction: str = "v") -> list[int]:
    """The batch of each call of the network, of three images on a grid of four timesteps."""
    network = Recorder()
    x_t, _, labels = batch()
    schedule = make_schedule("cosine", 10)
    sampler = Sampler(make_calls(schedule, prediction, (9, 7, 4, 2), "ddim", guidance), guidance)
    sampler(network, x_t, labels, 0, torch.arange(3))
    return [len(call[0]) for call in network.calls]


def test_guidance_one_calls_the_network_as_it_is() -> None:
    assert calls_of(Guidance(1.0, NUM_CLASSES)) == [3] * 4
    assert calls_of(Guidance(2.0, NUM_CLASSES)) == [6] * 4


def test_guidance_outside_its_interval_costs_nothing() -> None:
    """Times of the grid are 1.0, 0.8, 0.5 and 0.3; outside, the answer is that of a guidance of 1."""
    assert calls_of(Guidance(2.0, NUM_CLASSES, interval=(0.4, 0.9))) == [3, 6, 6, 3]
    assert calls_of(Guidance(2.0, NUM_CLASSES, interval=(0.3, 0.5))) == [3, 3, 6, 6]


@pytest.mark.parametrize("rescale", [0.3, 1.0])
def test_rescaled_guidance_has_the_conditional_deviation(rescale: float) -> None:
    """Lin et al. 2023, equations 15 and 16, for each image alone."""
    x_t, t, labels = batch()
    both = predict_both(Recorder(), x_t, t, labels, NUM_CLASSES) * torch.rand(6, 2, 4, 4, dtype=torch.float64)
    rule = Guidance(5.0, NUM_CLASSES, rescale=rescale)
    found = rule.weigh(both, channels=2)
    for i in range(3):
        conditional, null = both[i], both[3 + i]
        guided = null + 5.0 * (conditional - null)
        wanted = guided * conditional.std() / guided.std()
        torch.testing.assert_close(found[i], rescale * wanted + (1 - rescale) * guided, rtol=1e-12, atol=1e-12)
        if rescale == 1.0:
            torch.testing.assert_close(found[i].std(), conditional.std())


def test_rescaling_takes_flat_answers_and_ignores_sigma() -> None:
    both = torch.ones(2, 4, 3, 3)
    both[:, 2:] = float("nan")
    assert torch.equal(Guidance(3.0, NUM_CLASSES, rescale=0.7).weigh(both, channels=2), torch.ones(1, 2, 3, 3))


def test_the_sampler_rescales() -> None:
    x_t, _, labels = batch()
    schedule, ids = make_schedule("cosine", 10), torch.arange(3)

    def run(rescale: float) -> Tensor:
        rule = Guidance(3.0, NUM_CLASSES, rescale=rescale)
        sampler = Sampler(make_calls(schedule, "v", (9, 4), "ddim", rule), rule)
        return sampler(lambda x, t, y: x.sin() * (1 + y.view(-1, 1, 1, 1)), x_t, labels, 0, ids)

    assert float((run(0.0) - run(0.7)).abs().max()) > 1e-2


def test_guidance_acts_alike_on_every_prediction() -> None:
    x_t, t, labels = batch()
    schedule = make_schedule("cosine", 10)
    alpha, sigma = schedule.at(t, x_t)
    network = Recorder()
    for source, other in itertools.permutations(("eps", "x0", "v"), 2):

        def converted(x: Tensor, t: Tensor, y: Tensor, source: str = source, other: str = other) -> Tensor:
            return convert(network(x, t, y), source, other, x, *schedule.at(t, x))

        direct = guided(network, 4.0, x_t, t, labels)
        through = guided(converted, 4.0, x_t, t, labels)
        torch.testing.assert_close(convert(through, other, source, x_t, alpha, sigma), direct, rtol=1e-8, atol=1e-8)
