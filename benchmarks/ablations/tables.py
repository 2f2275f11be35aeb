"""The table and the picture of an ablation."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ablations.recipes import PLAIN
from ablations.runs import Curve, Point, reached

Curves = Mapping[str, Sequence[Curve]]  # by recipe, one a seed

_HEADER = (
    "recipe",
    "steps fewer",
    "time less",
    "final loss",
    "steps fewer, noise error",
    "final noise error",
    "steps fewer, Frechet",
    "final Frechet",
    "final kernel",
    "ms/step",
)  # fmt: skip


def gain(
    curves: Sequence[Curve],
    plain: Sequence[Curve],
    figure: Callable[[Point], float | None],
    place: Callable[[Point], float],
) -> list[float]:
    """For each seed: the plain run's steps (or seconds) by those until its final value is reached; 0 if it is not."""
    ratios = []
    for curve, reference in zip(curves, plain, strict=True):
        goal = figure(reference.last)
        assert goal is not None, "the last checkpoint has every figure"
        ratios.append(place(reference.last) / reached(curve.points, figure, goal, place))
    return ratios


def gains_in_steps(curves: Curves) -> dict[str, float]:
    """How many times fewer steps each recipe takes to the plain one's validation loss; medians over seeds."""
    return {
        name: statistics.median(gain(of_name, curves[PLAIN], loss_of, step_of))
        for name, of_name in curves.items()
        if name != PLAIN
    }


def table(curves: Curves) -> str:
    """A line a recipe in Markdown, medians over the seeds with the range of all where it matters."""
    plain = curves[PLAIN]
    lines = ["| " + " | ".join(_HEADER) + " |", "|---" * len(_HEADER) + "|"]
    for name, of_name in curves.items():
        per_step = statistics.median(1e3 * curve.last.seconds / curve.last.step for curve in of_name)
        cells = (
            name,
            _ratios(gain(of_name, plain, loss_of, step_of)),
            _ratios(gain(of_name, plain, loss_of, seconds_of)),
            _values([curve.last.loss for curve in of_name]),
            _ratios(gain(of_name, plain, noise_of, step_of)),
            _values([curve.last.noise for curve in of_name]),
            _ratios(gain(of_name, plain, frechet_of, step_of)),
            _values([_known(curve.last.frechet) for curve in of_name]),
            _values([_known(curve.last.kernel) for curve in of_name]),
            f"{per_step:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(curves: Curves, title: str, file: Path) -> None:
    """Writes the curves over steps as a picture: medians, with the range of the seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(17, 5), layout="constrained")
    colours = pyplot.get_cmap("tab20")
    for number, (name, of_name) in enumerate(curves.items()):
        style = {"color": "black", "linewidth": 2.5} if name == PLAIN else {"color": colours(number % 20)}
        for axes, (value_of, _) in zip(panels, _PANELS, strict=True):
            points = [[point for point in curve.points if value_of(point) is not None] for curve in of_name]
            columns = list(zip(*points, strict=True))
            steps = [column[0].step for column in columns]
            values = [[_known(value_of(point)) for point in column] for column in columns]
            axes.plot(steps, [statistics.median(column) for column in values], label=name, marker=".", **style)
            axes.fill_between(steps, list(map(min, values)), list(map(max, values)), color=style["color"], alpha=0.12)
    for axes, (_, name) in zip(panels, _PANELS, strict=True):
        axes.set(title=name, xlabel="optimizer steps", yscale="log")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def loss_of(point: Point) -> float:
    return point.loss


def noise_of(point: Point) -> float:
    return point.noise


def frechet_of(point: Point) -> float | None:
    return point.frechet


def step_of(point: Point) -> float:
    return float(point.step)


def seconds_of(point: Point) -> float:
    return point.seconds


_PANELS: tuple[tuple[Callable[[Point], float | None], str], ...] = (
    (loss_of, "validation loss: error of picture + error of noise"),
    (noise_of, "error of noise"),
    (frechet_of, "Frechet distance of samples"),
)


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _ratios(values: Sequence[float]) -> str:
    """The median and, of several, the range; a seed that never got there counts as 0."""
    middle = statistics.median(values)
    if middle == 0.0:
        return "not reached"
    spread = "" if len(values) == 1 else f" ({min(values):.2f} to {max(values):.2f})"
    return f"{middle:.2f}x{spread}"


def _values(values: Sequence[float]) -> str:
    spread = "" if len(values) == 1 else f" ± {(max(values) - min(values)) / 2:.1g}"
    return f"{statistics.median(values):.4g}{spread}"
