"""What a probe measured: tables of a title, column names and rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Table:
    """Rows of measured values; a float is printed with four significant digits."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def text(self) -> str:
        """The table for a terminal: numbers are aligned on the right, the last column is free."""
        cells = [[_cell(value) for value in row] for row in self.rows]
        columns = list(zip(self.head, *cells, strict=True))
        widths = [max(map(len, column)) for column in columns]
        right = [all(_is_number(row[i]) for row in self.rows) for i in range(len(self.head))]
        lines = [
            "  ".join(
                word.rjust(width) if at_right else word.ljust(width)
                for word, width, at_right in zip(line, widths, right, strict=True)
            ).rstrip()
            for line in (self.head, *cells)
        ]
        return "\n".join([self.title, *("  " + line for line in lines)])

    def column(self, name: str) -> list[Any]:
        """The values of a column."""
        place = list(self.head).index(name)
        return [row[place] for row in self.rows]


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
