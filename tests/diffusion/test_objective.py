"""The objective is the same whatever batch a sample is in, and its loss is a sum over true elements."""

import math

import pytest
import torch
from torch import Tensor

from megadiff.config.schema import DiffusionConfig
from megadiff.diffusion.condition import drop_condition
from megadiff.diffusion.objective import DiffusionObjective, TrainingInputs
from megadiff.diffusion.schedule import NoiseSchedule, make_schedule
from megadiff.errors import ConfigError

NUM_CLASSES = 7


def make_objective(seed: int = 3, schedule: NoiseSchedule | None = None, **settings: object) -> DiffusionObjective:
    config = DiffusionConfig.model_validate({"num_train_timesteps": 50, **settings})
    tables = schedule or make_schedule(config.schedule, config.num_train_timesteps)
    return DiffusionObjective(tables, config, NUM_CLASSES, seed)


def make_batch(num: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(num, 3, 4, 4, generator=generator, dtype=dtype) * 2 - 1
    return images, torch.arange(num) % NUM_CLASSES, torch.arange(num) + 1000


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
def test_inputs_satisfy_the_definitions(prediction: str) -> None:
    objective = make_objective(prediction=prediction, loss_weight="min_snr")
    images, labels, ids = make_batch(64, torch.float64)
    inputs = objective.prepare(images, labels, ids, step=5)
    alpha, sigma = objective.schedule.at(inputs.t, images)
    noise = (inputs.x_t - alpha * images) / sigma
    expected = {"eps": noise, "x0": images, "v": alpha * noise - sigma * images}[prediction]
    torch.testing.assert_close(inputs.target, expected, rtol=0, atol=1e-9)
    assert abs(float(noise.mean())) < 5 / math.sqrt(noise.numel())
    assert abs(float(noise.var()) - 1) < 5 * math.sqrt(2 / noise.numel())
    snr = (alpha / sigma).flatten() ** 2
    scale = {"eps": snr, "x0": torch.ones_like(snr), "v": snr + 1}[prediction]
    torch.testing.assert_close(inputs.weight, snr.clamp(max=5.0) / scale, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    inputs = make_objective().prepare(*make_batch(4, dtype), step=0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert inputs.x_t.dtype == inputs.target.dtype == inputs.weight.dtype == wide
    assert inputs.t.dtype == inputs.labels.dtype == torch.int64


def test_a_sample_is_prepared_alike_in_any_batch() -> None:
    objective = make_objective(condition_dropout=0.5, loss_weight="min_snr")
    batch = make_batch(12)
    whole = objective.prepare(*batch, step=9)
    pieces = [objective.prepare(*(part[rows] for part in batch), step=9) for rows in ([3], [11, 0], [7, 8, 9])]
    rows = [3, 11, 0, 7, 8, 9]
    for name in TrainingInputs.__dataclass_fields__.keys() - {"pictures"}:  # without a perceptual loss there are none
        found = torch.cat([getattr(piece, name) for piece in pieces])
        torch.testing.assert_close(found, getattr(whole, name)[rows], rtol=0, atol=1e-5)


def test_seed_step_and_sample_id_each_change_the_draw() -> None:
    images, labels, ids = make_batch(32)
    base = make_objective().prepare(images, labels, ids, step=0)
    others = [
        make_objective(seed=4).prepare(images, labels, ids, step=0),
        make_objective().prepare(images, labels, ids, step=1),
        make_objective().prepare(images, labels, ids + 32, step=0),
    ]
    for other in others:
        assert not torch.equal(other.t, base.t)
        assert float((other.x_t - base.x_t).abs().min(dim=0).values.max()) > 0


def test_timesteps_are_uniform_and_reach_both_ends() -> None:
    images, labels, ids = (
        torch.zeros(20000, 1, 1, 1),
        torch.zeros(20000, dtype=torch.int64),
        torch.arange(20000),
    )
    t = make_objective(num_train_timesteps=20).prepare(images, labels, ids, step=0).t
    counts = t.bincount(minlength=20)
    assert len(counts) == 20
    assert float(((counts - 1000.0) ** 2 / 1000.0).sum()) < 50.8  # 0.9999 quantile, 19 degrees of freedom


@pytest.mark.parametrize("probability", [0.0, 0.1, 1.0])
def test_conditions_are_dropped_with_their_probability(probability: float) -> None:
    num = 20000
    labels = torch.arange(num) % NUM_CLASSES
    objective = make_objective(condition_dropout=probability)
    found = objective.prepare(torch.zeros(num, 1, 1, 1), labels, torch.arange(num), step=2).labels
    dropped = found == NUM_CLASSES
    spread = math.sqrt(probability * (1 - probability) / num)
    assert abs(float(dropped.double().mean()) - probability) <= 4 * spread
    assert torch.equal(found[~dropped], labels[~dropped])


def test_texts_are_dropped_where_classes_would_be() -> None:
    """By seed, step and sample number alone; a dropped text is zero."""
    ids = torch.arange(400)
    classes = drop_condition(torch.ones(400, dtype=torch.int64), 10, 0.3, seed=5, step=7, sample_ids=ids)
    texts = drop_condition(torch.ones(400, 6), 10, 0.3, seed=5, step=7, sample_ids=ids)
    dropped = classes == 10
    assert 0.2 < dropped.float().mean() < 0.4
    assert torch.equal(texts, (~dropped).float()[:, None].expand(-1, 6))
    other = drop_condition(torch.ones(400, 6), 10, 0.3, seed=5, step=8, sample_ids=ids)
    assert not torch.equal(other, texts)


def test_timestep_noise_and_dropout_are_independent() -> None:
    num = 20000
    objective = make_objective(condition_dropout=0.5, prediction="eps")
    inputs = objective.prepare(torch.zeros(num, 1, 1, 1), torch.zeros(num).long(), torch.arange(num), step=0)
    streams = torch.stack((inputs.t.double(), inputs.labels.double(), inputs.target.flatten().double()))
    correlations = torch.corrcoef(streams) - torch.eye(3)
    assert float(correlations.abs().max()) < 5 / math.sqrt(num)


def test_a14_loss_is_accumulated_in_float32() -> None:
    """2**16 squared errors of 1/4 in bfloat16 inputs: a bfloat16 sum would stop growing at 64."""
    output = torch.full((1, 1, 256, 256), 0.5, dtype=torch.bfloat16)
    loss = make_objective().losses(output, torch.zeros_like(output), torch.ones(1, dtype=torch.bfloat16)).sum()
    assert loss.dtype == torch.float32
    assert float(loss) == 2**14


def test_loss_is_the_weighted_sum_and_float64_if_an_input_is() -> None:
    generator = torch.Generator().manual_seed(1)
    output, target = torch.randn(2, 5, 3, 2, 2, generator=generator, dtype=torch.float64)
    weight = torch.rand(5, generator=generator, dtype=torch.float64)
    expected = sum(
        float(weight[b]) * (float(o) - float(t)) ** 2
        for b in range(5)
        for o, t in zip(output[b].flatten(), target[b].flatten(), strict=True)
    )
    loss = make_objective().losses(output, target, weight, None).sum()
    assert loss.dtype == torch.float64 and float(loss) == pytest.approx(expected, rel=1e-12)
    assert int(make_objective().num_elements(target)) == 60


def test_the_sigma_half_of_a_learn_sigma_output_is_not_trained() -> None:
    objective = make_objective()
    target, weight = torch.zeros(2, 3, 4, 4), torch.ones(2)
    output = torch.ones(2, 6, 4, 4, requires_grad=True)
    loss = objective.losses(output, target, weight, None).sum()
    loss.backward()
    assert float(loss.detach()) == 2 * 3 * 16 and output.grad is not None
    assert torch.equal(output.grad[:, :3], torch.full((2, 3, 4, 4), 2.0))
    assert torch.equal(output.grad[:, 3:], torch.zeros(2, 3, 4, 4))


@pytest.mark.parametrize("partition", [[6], [4, 2], [1, 5], [3, 3], [1, 1, 1, 1, 1, 1]])
def test_b06_gradient_does_not_depend_on_how_the_batch_is_cut(partition: list[int]) -> None:
    """Masks of 1, 64 and 0 positions; sums over micro-batches divided by the global count, in float64."""
    objective = make_objective(loss_weight="min_snr")
    images, labels, ids = make_batch(6, torch.float64)
    images = torch.nn.functional.interpolate(images, size=8)
    mask = torch.zeros(6, 1, 8, 8)
    mask[[1, 4]] = 1.0
    mask[[0, 3], :, 2, 5] = 1.0
    scale = torch.full((3, 1, 1), 0.7, dtype=torch.float64, requires_grad=True)

    count = torch.zeros((), dtype=torch.int64)
    start = 0
    for size in partition:
        rows = slice(start, start + size)
        start += size
        inputs = objective.prepare(images[rows], labels[rows], ids[rows], step=0)
        objective.losses(scale * inputs.x_t, inputs.target, inputs.weight, mask[rows]).sum().backward()
        count = count + objective.num_elements(inputs.target, mask[rows])
    assert int(count) == 3 * (64 + 64 + 1 + 1)

    whole = objective.prepare(images, labels, ids, step=0)
    valid = mask.bool().expand_as(images)
    weights = whole.weight.view(-1, 1, 1, 1).expand_as(images)
    exact = (2 * weights * (0.7 * whole.x_t - whole.target) * whole.x_t).where(valid, 0.0).sum((0, 2, 3))
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad.flatten() / count, exact / valid.sum(), rtol=1e-10, atol=1e-14)


def test_b06_masked_positions_may_hold_anything() -> None:
    objective = make_objective()
    output = torch.zeros(1, 3, 2, 2, requires_grad=True)
    target = torch.ones(1, 3, 2, 2)
    target[..., 0] = float("nan")
    mask = torch.tensor([0.0, 1.0]).expand(1, 1, 2, 2)
    loss = objective.losses(output, target, torch.ones(1), mask).sum()
    loss.backward()
    assert float(loss.detach()) == 6.0 and output.grad is not None and bool(output.grad.isfinite().all())
    empty = objective.losses(output, target, torch.ones(1), torch.zeros(1, 1, 2, 2)).sum()
    assert float(empty.detach()) == 0.0
    assert int(objective.num_elements(target, torch.zeros(1, 1, 2, 2))) == 0
    assert int(objective.num_elements(target, mask)) == 6


def test_b03_impossible_settings_are_refused_at_construction() -> None:
    pure_noise = NoiseSchedule(
        torch.tensor([0.8, 0.0], dtype=torch.float64), torch.tensor([0.6, 1.0], dtype=torch.float64)
    )
    with pytest.raises(ConfigError, match=r"prediction = eps .*alpha = 0"):
        make_objective(schedule=pure_noise, prediction="eps")
    make_objective(schedule=pure_noise, prediction="v", loss_weight="min_snr")
