"""The picture of an evaluation: some fakes beside their nearest real pictures, and how far such neighbours are."""

from pathlib import Path
from typing import Any

from torch import Tensor

from megadiff.errors import DataError
from megadiff.evaluation.images import Images, choose_rows
from megadiff.evaluation.neighbours import nearest, nearest_others

_FAKES, _NEIGHBOURS = 8, 5


def draw(file: Path, real: Images, fake: Images, real_features: Tensor, fake_features: Tensor, title: str) -> None:
    """Writes a PNG. A copy of a training picture shows at distance 0; fakes that are all alike share neighbours.

    Args:
        real_features: (N, D) of `real`.
        fake_features: (M, D) of `fake`.
        title: above everything.

    Raises:
        DataError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure = pyplot.figure(figsize=(13, 7.5), layout="constrained")
    pictures, distances = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    _draw_neighbours(pictures, real, fake, real_features, fake_features)
    _draw_distances(distances.subplots(), real_features, fake_features)
    figure.suptitle(title)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def require_matplotlib() -> None:
    """Refuses before anything is computed what could not be drawn at the end.

    Raises:
        DataError: matplotlib is not installed.
    """
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise DataError(f"--output draws with matplotlib ({error}); pip install 'megadiff[evaluate]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw_neighbours(part: Any, real: Images, fake: Images, real_features: Tensor, fake_features: Tensor) -> None:
    count, columns = min(_FAKES, len(fake)), min(_NEIGHBOURS, len(real))
    rows = choose_rows(len(fake), count, fake.title)
    found = nearest(fake_features[rows], real_features, columns)
    axes = part.subplots(count, columns + 1, squeeze=False)
    for line, row in enumerate(rows):
        _show(axes[line, 0], fake.load(row), "")
        for column in range(columns):
            index, distance = int(found.indices[line, column]), float(found.distances[line, column])
            _show(axes[line, column + 1], real.load(index), f"{distance:.3g}")
    axes[0, 0].set_title("fake", fontsize=9)
    part.supxlabel(f"fakes, and the {columns} real pictures nearest to each, with distances", fontsize=10)


def _show(axes: Any, image: Tensor, title: str) -> None:
    axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_title(title, fontsize=8)
    axes.set_axis_off()


def _draw_distances(axes: Any, real_features: Tensor, fake_features: Tensor) -> None:
    sets = {
        "real to the nearest other real": nearest_others(real_features, 1),
        "fake to the nearest real": nearest(fake_features, real_features, 1),
        "fake to the nearest other fake": nearest_others(fake_features, 1),
    }
    for name, found in sets.items():
        axes.ecdf(found.distances[:, 0].cpu().numpy(), label=name)
    axes.set(xlabel="distance of features", ylabel="share of pictures that are as near")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
