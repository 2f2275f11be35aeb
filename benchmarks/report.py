"""Rows of a benchmark: each is a ratio that must reach a limit; printed as a table and written as JSON."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: what is compared.
        ours, other: the two measured or computed figures, with `unit`.
        ratio: ours by other, or other by ours where the figures are times.
        must: the limit of `ratio` that has to be kept, None where the row is information only.
        aim: the ratio that is hoped for, None without one.
        lower_is_better: whether `must` is an upper limit.
        exact: whether `ratio` must equal `must`.
        note: a remark for the reader.
    """

    name: str
    ours: float
    other: float
    unit: str
    ratio: float
    must: float | None
    aim: float | None = None
    lower_is_better: bool = False
    exact: bool = False
    note: str = ""

    @property
    def is_kept(self) -> bool:
        if self.must is None:
            return True
        if self.exact:
            return self.ratio == self.must
        return self.ratio <= self.must if self.lower_is_better else self.ratio >= self.must


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every benchmark has."""
    parser.add_argument("--json", type=Path, help="file for the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that it runs")


def print_rows(rows: Sequence[Row]) -> None:
    """Prints one line a row with aligned columns, then the notes."""
    header = ("", "ours", "other", "unit", "ratio", "must", "aim", "")
    cells = [header, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = (0, 3, 7)
    for line in cells:
        padded = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(padded).rstrip())
    for row in rows:
        if row.note:
            print(f"{row.name}: {row.note}")


def _cells(row: Row) -> tuple[str, ...]:
    sign = "" if row.must is None else "= " if row.exact else "<= " if row.lower_is_better else ">= "
    return (
        row.name,
        _figure(row.ours),
        _figure(row.other),
        row.unit,
        f"{row.ratio:.3f}",
        "" if row.must is None else f"{sign}{row.must:g}",
        "" if row.aim is None else f"{row.aim:g}",
        "" if row.must is None else "ok" if row.is_kept else "MISSED",
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Writes `{"rows": [...]}`."""
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n", encoding="utf-8")
