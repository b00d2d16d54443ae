"""Rows as a data frame whose columns and types are those that are documented."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from jobkit.analysis.columns import COUNT, FLAG, NUMBER, TEXT, Column

Row = dict[str, Any]


def frame(rows: list[Row], columns: tuple[Column, ...]) -> pd.DataFrame:
    """Rows as a table with every column, each of its type, and at the end any others they have."""
    known = {c.name: c.dtype for c in columns}
    others = sorted({str(name) for row in rows for name in row} - known.keys())
    dtypes = known | {name: _guess(row.get(name) for row in rows) for name in others}
    cells = {k: [_fit(row.get(k), dtype) for row in rows] for k, dtype in dtypes.items()}
    return pd.DataFrame({k: pd.Series(cells[k], dtype=dtype) for k, dtype in dtypes.items()})


def _guess(values: Iterable[Any]) -> str:
    """The type of a column that a foreign script made."""
    return NUMBER if {type(v) for v in values} <= {int, float, type(None)} else TEXT


def _fit(value: Any, dtype: str) -> Any:
    """A value as a column of this type takes it; None where it is something else."""
    if isinstance(value, bool) and dtype != FLAG:
        return str(value) if dtype == TEXT else None
    if dtype == TEXT:
        return None if value is None else str(value)
    if dtype == NUMBER and type(value) is int:
        return float(value)
    fits = {COUNT: int, NUMBER: float}.get(dtype, bool)
    return value if type(value) is fits else None


def records(table: pd.DataFrame) -> list[Row]:
    """The rows of a table, by the names of its columns."""
    return [{str(k): v for k, v in row.items()} for row in table.to_dict("records")]
