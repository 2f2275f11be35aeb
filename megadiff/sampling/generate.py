"""Makes images of given classes or texts, split over the data-parallel ranks and put together again on each of them.

The ranks are plain numbers here; whoever calls it passes in how to join the parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megadiff.config.schema import Config, ModelConfig
from megadiff.diffusion.condition import Condition, stack_conditions
from megadiff.sampling.dynamic import DynamicSampler
from megadiff.sampling.guidance import Predict
from megadiff.sampling.sampler import Sampler, initial_noise, sampler_of


@dataclass(frozen=True)
class ImageRequest:
    """Which images to make.

    Attributes:
        conditions: class or text of each image; any class where the network has no condition.
        image_ids: number of each image; with `seed` it fixes the image's noise, whatever the batch.
        seed: of the whole request.
        batch_size: most images that go through the network at once on one rank (twice as many with guidance).
    """

    conditions: Sequence[Condition]
    image_ids: Sequence[int]
    seed: int
    batch_size: int = 64


def generate(
    request: ImageRequest,
    config: Config,
    open_predict: Callable[[], Predict],
    device: torch.device,
    data_rank: int,
    data_degree: int,
    join: Callable[[Tensor], Tensor],
) -> Tensor:
    """Samples with the solver of `config.sampling`.

    All ranks make the same number of images, because a sharded network needs all of them at every call; the last image
    is repeated where the number does not divide, and the surplus is dropped.

    Args:
        request: which images.
        config: of the network.
        open_predict: gives the network, (x_t, t, labels) -> output, for the calls of one batch.
        device: where to compute.
        data_rank, data_degree: this rank among those that share the work.
        join: the parts of all ranks along dim 0, in rank order.

    Returns:
        (N, C, H, W) float32 in the order of the request, on every rank.
    """
    count = len(request.conditions)
    share = -(-count // data_degree)
    order = [min(index, count - 1) for index in range(data_rank * share, (data_rank + 1) * share)]
    sampler = sampler_of(config)
    parts = [
        _sample(request, order[start : start + request.batch_size], config.model, sampler, open_predict(), device)
        for start in range(0, share, request.batch_size)
    ]
    return join(torch.cat(parts))[:count]


def _sample(
    request: ImageRequest,
    order: Sequence[int],
    model: ModelConfig,
    sampler: Sampler | DynamicSampler,
    predict: Predict,
    device: torch.device,
) -> Tensor:
    labels = stack_conditions([request.conditions[index] for index in order]).to(device)
    image_ids = torch.tensor([request.image_ids[index] for index in order], device=device)
    noise = initial_noise(request.seed, image_ids, (model.in_channels, model.input_size, model.input_size))
    return sampler(predict, noise, labels, request.seed, image_ids)
