"""Rows as a data frame with the documented columns and types."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jobkit.analysis.tables.column import COUNT, FLAG, NUMBER, TEXT, Column
from jobkit.errors import one_line

Row = dict[str, Any]
_PLAIN: dict[str, type] = {TEXT: str, COUNT: int, NUMBER: float, FLAG: bool}
_TOO_LARGE = 1 << 63  # of a number of 64 bits
MOST_OTHERS = 200  # columns that foreign scripts name, in a table


def frame(
    rows: Sequence[Row], columns: tuple[Column, ...], left_out: Iterable[str] = ()
) -> pd.DataFrame:
    """Rows as a table with every column, each of its type, and at the end others that they have.

    left_out: names that become no column unless they are among columns. Of the others there are
    MOST_OTHERS at most.
    """
    known = {c.name: c.dtype for c in columns}
    cells = {}
    for name in (*known, *others(rows, columns, left_out)[:MOST_OTHERS]):
        values = [row.get(name) for row in rows]
        cells[name] = _column(values, known.get(name) or _guess(values))
    return pd.DataFrame({one_line(name): column for name, column in cells.items()})


def others(
    rows: Sequence[Row], columns: tuple[Column, ...], left_out: Iterable[str] = ()
) -> list[str]:
    """The names in rows that are neither those of columns nor left out, sorted."""
    return sorted(set().union(*rows) - {c.name for c in columns} - set(left_out))


def _guess(values: Iterable[Any]) -> str:
    """The type of a column that another program named."""
    return NUMBER if set(map(type, values)) <= {int, float, type(None)} else TEXT


def _column(values: list[Any], dtype: str) -> pd.Series:
    """The values as a column of a type; empty where a value is something else."""
    if not set(map(type, values)) <= {_PLAIN[dtype], type(None)}:
        values = [_fit(value, dtype) for value in values]
    if dtype == TEXT:
        shown = {value: value and one_line(value) for value in set(values)}
        values = [shown[value] for value in values]
    if dtype == COUNT:
        values = [v if v is None or abs(v) < _TOO_LARGE else None for v in values]
    if dtype != NUMBER:
        return pd.Series(values, dtype=dtype)
    numbers = np.array(values, dtype=float)  # None becomes NaN
    return pd.Series(pd.arrays.FloatingArray(numbers, ~np.isfinite(numbers)))


def _fit(value: Any, dtype: str) -> Any:
    """A value as a column of this type takes it; None where it is something else."""
    if isinstance(value, bool) and dtype != FLAG:
        return str(value) if dtype == TEXT else None
    if dtype == TEXT:
        return None if value is None else str(value)
    if dtype == NUMBER and type(value) is int:
        return float(value) if abs(value) < _TOO_LARGE else None
    return value if type(value) is _PLAIN[dtype] else None


def records(table: pd.DataFrame) -> list[Row]:
    """The rows of a table, by the names of its columns."""
    return [{str(k): v for k, v in row.items()} for row in table.to_dict("records")]
