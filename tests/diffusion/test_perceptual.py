"""The hybrid loss against its formula, term by term, and where it counts at all."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from megadiff.config.schema import DiffusionConfig
from megadiff.diffusion.objective import DiffusionObjective
from megadiff.diffusion.perceptual import gram, make_perceptual
from megadiff.diffusion.schedule import SCHEDULES, NoiseSchedule, make_schedule

NUM = 6


def features_of(images: Tensor) -> Tensor:
    """Some nonlinear features that are quick to compute."""
    return nn.functional.avg_pool2d((3.0 * images).sin().repeat(1, 2, 1, 1), 2)


def make(prediction: str = "v", schedule: NoiseSchedule | None = None, **settings: object) -> DiffusionObjective:
    values = {"num_train_timesteps": 50, "prediction": prediction, "perceptual_weight": 0.3, **settings}
    config = DiffusionConfig.model_validate(values)
    tables = schedule or make_schedule("cosine", 50)
    return DiffusionObjective(tables, config, 7, 0, perceptual=make_perceptual(config, tables, features_of))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(NUM, 3, 4, 4, generator=generator, dtype=torch.float64) * 2 - 1
    return images, torch.zeros(NUM, dtype=torch.int64), torch.arange(NUM)


@pytest.mark.parametrize("prediction", ["eps", "x0", "v", "flow"])
def test_a11_the_loss_is_seven_tenths_mse_and_three_tenths_of_features(prediction: str) -> None:
    objective = make(prediction, perceptual_min_snr=0.0)
    images, labels, ids = batch()
    inputs = objective.prepare(images, labels, ids, step=3)
    output = torch.randn(inputs.target.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alpha, sigma = objective.schedule.at(inputs.t, images)
    noise = (inputs.x_t - alpha * images) / sigma
    predicted = {
        "eps": lambda: (inputs.x_t - sigma * output) / alpha,
        "x0": lambda: output,
        "v": lambda: alpha * inputs.x_t - sigma * output,
        "flow": lambda: (inputs.x_t - sigma * output) / (alpha + sigma),
    }[prediction]()
    target = {"eps": noise, "x0": images, "v": alpha * noise - sigma * images, "flow": noise - images}[prediction]
    mse = (output - target).square().flatten(1).mean(1)
    difference = (features_of(predicted) - features_of(images)).abs().flatten(1).mean(1)
    expected = (0.7 * mse + 0.3 * difference) * target[0].numel()
    found = objective.losses(output, inputs.target, inputs.weight, pictures=inputs.pictures)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a12_gram_matrices_are_compared_beside_it() -> None:
    plain, textured = (make(perceptual_min_snr=0.0, gram_weight=weight) for weight in (0.0, 2.0))
    inputs = plain.prepare(*batch(), step=3)
    output = torch.zeros_like(inputs.target)
    losses = [o.losses(output, inputs.target, inputs.weight, pictures=inputs.pictures) for o in (plain, textured)]
    alpha, sigma = plain.schedule.at(inputs.t, output)
    matrices = []
    for pictures in (alpha * inputs.x_t - sigma * output, batch()[0]):
        flat = features_of(pictures).flatten(2)
        matrices.append(torch.einsum("bip,bjp->bij", flat, flat) / (flat.shape[1] * flat.shape[2]))
    expected = 2.0 * (matrices[0] - matrices[1]).square().flatten(1).mean(1) * output[0].numel()
    torch.testing.assert_close(losses[1] - losses[0], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gram(torch.ones(1, 3, 2, 2)), torch.full((1, 3, 3), 1 / 3))


def test_features_count_only_above_the_bound() -> None:
    objective = make(perceptual_min_snr=1.0)
    inputs = objective.prepare(*batch(), step=3)
    clear = objective.schedule.snr[inputs.t] > 1.0
    assert 0 < int(clear.sum()) < NUM
    output = torch.zeros_like(inputs.target)
    with_features = objective.losses(output, inputs.target, inputs.weight, pictures=inputs.pictures)
    squared = 0.7 * objective.losses(output, inputs.target, inputs.weight)
    assert torch.equal(with_features[~clear], squared[~clear])
    assert bool((with_features[clear] > squared[clear]).all())


def test_gradients_are_finite_at_both_ends_of_every_schedule() -> None:
    """The predicted x0 of eps is huge at the noisy end; where nothing counts it must not spoil the gradient."""
    for name, prediction, zero_end in itertools.product(SCHEDULES, ("eps", "x0", "v", "flow"), (False, True)):
        ends_in_noise = name == "flow" or zero_end
        if prediction == "eps" and ends_in_noise:
            continue
        schedule = make_schedule(name, 50, zero_terminal_snr=zero_end and name != "flow")
        objective = make(prediction, schedule, gram_weight=1.0)
        rows = torch.tensor([0, 49])
        perceptual = objective.perceptual
        assert perceptual is not None
        x0 = batch()[0][:2].float()
        alpha, sigma = schedule.at(rows, x0)
        x_t = alpha * x0 + sigma
        output = (100 * torch.ones_like(x0)).requires_grad_()
        perceptual.per_sample(output, x0, x_t, perceptual.table[rows]).sum().backward()
        assert output.grad is not None and bool(output.grad.isfinite().all()), (name, prediction)
        assert bool(output.grad[1].any()) == bool(schedule.snr[49] > 1.0)


def test_importance_weighs_the_features_as_well() -> None:
    objective = make(perceptual_min_snr=0.0)
    inputs = objective.prepare(*batch(), step=3)
    before = objective.losses(torch.zeros_like(inputs.target), inputs.target, inputs.weight, pictures=inputs.pictures)
    objective.importance.factors = torch.full((50,), 2.0, dtype=torch.float64)
    objective.refresh_weights()
    again = objective.prepare(*batch(), step=3)
    after = objective.losses(torch.zeros_like(again.target), again.target, again.weight, pictures=again.pictures)
    torch.testing.assert_close(after, 2 * before)


def test_masked_pictures_are_refused() -> None:
    objective = make()
    inputs = objective.prepare(*batch(), step=0)
    with pytest.raises(ValueError, match="whole pictures"):
        objective.losses(inputs.target, inputs.target, inputs.weight, torch.ones(NUM, 1, 4, 4), inputs.pictures)
