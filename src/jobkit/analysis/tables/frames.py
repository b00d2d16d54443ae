"""Rows as a data frame with the documented columns and types."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from jobkit.analysis.tables.column import COUNT, FLAG, NUMBER, TEXT, Column
from jobkit.errors import one_line

Row = dict[str, Any]
Array = pd.api.extensions.ExtensionArray
_PLAIN: dict[str, type] = {TEXT: str, COUNT: int, NUMBER: float, FLAG: bool}
_TOO_LARGE = 1 << 63  # of a number of 64 bits
MOST_OTHERS = 200  # columns that foreign scripts name, in a table


def _others(names: Iterable[str], known: Iterable[str]) -> list[str]:
    return sorted({*names} - {*known})


def frame(
    rows: Sequence[Row], columns: tuple[Column, ...], left_out: Iterable[str] = ()
) -> pd.DataFrame:
    """Rows as a table with every column, each of its type, and at the end others that they have.

    left_out: names that become no column unless they are among columns. Of the others there are
    MOST_OTHERS at most; the table's attrs say how many more there were.
    """
    known = {c.name: c.dtype for c in columns}
    others = _others(chain.from_iterable(rows), {*known, *left_out})
    made, empty = dict[str, Array](), dict[str, Array]()
    for name in (*known, *others[:MOST_OTHERS]):
        column = [row.get(name) for row in rows]
        dtype = known.get(name) or _guess(column)
        if {*map(type, column)} <= {type(None)}:  # as most of a run's columns are
            if dtype not in empty:
                empty[dtype] = empty_column(len(rows), dtype)
            made[one_line(name)] = empty[dtype]  # of which the table takes a copy
        else:
            made[one_line(name)] = _column(column, dtype)
    table = pd.DataFrame(made, index=pd.RangeIndex(len(rows)))
    table.attrs["left_out"] = len(others[MOST_OTHERS:])
    return table


def empty_column(count: int, dtype: str) -> Array:
    """A column without any value."""
    return pd.Series(pd.NA, index=pd.RangeIndex(count), dtype=dtype).array


def _guess(values: Iterable[Any]) -> str:
    """The type of a column that another program named."""
    kinds = set(map(type, values)) - {type(None)}
    if kinds == {int}:
        return COUNT  # as a float a number from 2^53 on would be another one
    return NUMBER if kinds <= {int, float} else TEXT


def _column(values: Sequence[Any], dtype: str) -> Array:
    """The values as a column of a type; empty where a value is something else."""
    if not {*map(type, values)} <= {_PLAIN[dtype], type(None)}:
        values = [_fit(value, dtype) for value in values]
    if dtype == TEXT:
        shown = {value: value and one_line(value) for value in set(values)}
        values = [shown[value] for value in values]
    if dtype == COUNT:
        counts = [v for v in values if v is not None]
        if max(counts, default=0) >= _TOO_LARGE or min(counts, default=0) <= -_TOO_LARGE:
            values = [v if v is None or abs(v) < _TOO_LARGE else None for v in values]
    if dtype != NUMBER:
        return pd.Series(values, dtype=dtype).array
    numbers = np.array(values, dtype=float)  # None becomes NaN
    return pd.arrays.FloatingArray(numbers, ~np.isfinite(numbers))


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


def plain_records(table: pd.DataFrame) -> list[Row]:
    """As records, with None for what is not there: in a third of the time."""
    names = [str(name) for name in table.columns]
    cells = zip(*(plain_values(column) for _, column in table.items()), strict=True)
    return [dict(zip(names, row, strict=True)) for row in cells]


def plain_values(column: pd.Series) -> list[Any]:
    """The values of a column as Python has them; None where there is none."""
    missing = column.array.isna()
    if missing.all():
        return [None] * len(column)
    values = column.astype(object).tolist()
    return [None if gone else value for value, gone in zip(values, missing, strict=True)]
