"""The parity matrix as a table: network x layout, the largest relative difference of each quantity."""

from collections.abc import Iterable, Mapping

Cell = tuple[str, str, str]
Rows = Iterable[tuple[Cell, Mapping[str, tuple[float, str]]]]

_QUANTITIES = ("loss", "norm", "gradient", "weights", "average", "predict")


class Matrix:
    """Collects what the parity tests measured."""

    def __init__(self) -> None:
        self.rows: dict[Cell, dict[str, tuple[float, str]]] = {}

    def record(self, network: str, layout: str, precision: str, differences: Mapping[str, tuple[float, str]]) -> None:
        """Adds a run; of several runs of one cell the largest difference counts."""
        row = self.rows.setdefault((network, layout, precision), {})
        for quantity, found in differences.items():
            row[quantity] = max(row.get(quantity, found), found)

    def merge(self, rows: Rows) -> None:
        """Adds what another process collected."""
        for (network, layout, precision), differences in rows:
            self.record(network, layout, precision, differences)

    def lines(self) -> list[str]:
        """The table, one line a layout."""
        first, width = (max((len(key[place]) for key in self.rows), default=0) for place in (0, 1))
        head = f"{'network':{first}} {'layout':{width}} {'dtype':5}" + "".join(f" {q:>9}" for q in _QUANTITIES)
        lines = [head + "  largest gradient difference in"]
        for (network, layout, precision), row in self.rows.items():
            cells = "".join(f" {row[q][0]:9.1e}" if q in row else f" {'-':>9}" for q in _QUANTITIES)
            where = row["gradient"][1] if "gradient" in row else ""
            lines.append(f"{network:{first}} {layout:{width}} {precision:5}{cells}  {where}")
        return lines
