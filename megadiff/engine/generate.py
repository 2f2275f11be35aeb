"""Images from an engine's or a loaded network's prediction, on any layout."""

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.dist.grid import Axis
from megadiff.engine.engine import Engine
from megadiff.sampling.generate import ImageRequest, generate
from megadiff.sampling.guidance import Predict


def generate_on_grid(
    request: ImageRequest, config: Config, predict: Predict, device: torch.device, data: Axis
) -> Tensor:
    """Makes the images of a request on the ranks of a data axis; (N, C, H, W) on each; a collective call."""

    def join(part: Tensor) -> Tensor:
        if data.degree == 1:
            return part
        whole = part.new_empty(data.degree * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=data.group)
        return whole

    return generate(request, config, predict, device, data.index, data.degree, join)


def class_grid(engine: Engine, per_class: int) -> Tensor:
    """`per_class` images of each class in turn from the averaged weights, always of the same noise; collective."""
    classes = engine.config.model.num_classes
    labels = [label for label in range(classes) for _ in range(per_class)]
    request = ImageRequest(labels, range(len(labels)), seed=engine.config.train.seed)
    with engine.averaged_weights():
        return generate_on_grid(request, engine.config, engine.predict, engine.device, engine.grid.data)
