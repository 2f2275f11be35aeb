"""Images from an engine's or a loaded network's prediction, on any layout."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.data import Dataset
from megadiff.diffusion.condition import Condition
from megadiff.dist.grid import Axis
from megadiff.engine.engine import Engine
from megadiff.sampling.generate import ImageRequest, generate
from megadiff.sampling.guidance import Predict

_PREVIEW_ROWS = 4  # where there are no classes


def generate_on_grid(
    request: ImageRequest, config: Config, open_predict: Callable[[], Predict], device: torch.device, data: Axis
) -> Tensor:
    """Makes the images of a request on the ranks of a data axis; (N, C, H, W) on each; a collective call."""

    def join(part: Tensor) -> Tensor:
        if data.degree == 1:
            return part
        whole = part.new_empty(data.degree * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=data.group)
        return whole

    return generate(request, config, open_predict, device, data.index, data.degree, join)


def preview_conditions(config: Config, dataset: Dataset) -> list[Condition]:
    """What the rows of a preview show: every class, the texts of the first samples, or no condition in each."""
    if config.model.condition == "class":
        return list(range(config.model.num_classes))
    rows = range(min(_PREVIEW_ROWS, len(dataset)))
    return [dataset.load(row)[1] if config.model.condition == "text" else 0 for row in rows]


def preview(engine: Engine, rows: Sequence[Condition], per_row: int) -> Tensor:
    """`per_row` images of each condition in turn from the averaged weights, always of the same noise; collective."""
    conditions = [condition for condition in rows for _ in range(per_row)]
    return torch.cat(list(averaged_images(engine, conditions, len(conditions))))


def averaged_images(engine: Engine, conditions: Sequence[Condition], at_once: int) -> Iterator[Tensor]:
    """Images (B, C, H, W) of conditions from the averaged weights, always of the same noise; a collective call.

    The former weights are back when the last part has been taken.

    Args:
        at_once: most images of a part, over all ranks.
    """
    with engine.averaged_weights():
        for start in range(0, len(conditions), at_once):
            ids = range(len(conditions))[start : start + at_once]
            request = ImageRequest([conditions[number] for number in ids], ids, seed=engine.config.train.seed)
            yield generate_on_grid(request, engine.config, engine.open_predict, engine.device, engine.grid.data)
