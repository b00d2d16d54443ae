"""Tables with the documented columns and types: from rows, to CSV and back."""

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from jobkit.analysis.tables.columns import COUNT, FLAG, NUMBER, TEXT, Column
from jobkit.errors import UsageError, one_line
from jobkit.files import is_there, open_regular
from jobkit.paths import write_whole

Row = dict[str, Any]
Array = pd.api.extensions.ExtensionArray
_PLAIN: dict[str, type] = {TEXT: str, COUNT: int, NUMBER: float, FLAG: bool}
# The type of a column that another program named, by the types of its values; else it is a text.
_DTYPES = {frozenset([int]): COUNT, frozenset([bool]): FLAG}
_DTYPES |= {frozenset(kinds): NUMBER for kinds in ([float], [int, float], [])}
_TOO_LARGE = 1 << 63  # of a number of 64 bits
_LARGEST = 1e50  # or 1 / that: of no measurement, and ratios of such numbers have no axis
_MAX_BYTES = 1 << 31  # of a table
# A spreadsheet takes a text that begins so for a formula; the later four are of full width.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def frame(
    rows: Sequence[Row], columns: tuple[Column, ...], left_out: Iterable[str] = ()
) -> pd.DataFrame:
    """Rows as a table with every column, each of its type, and at the end others that they have.

    left_out: names that become no column unless they are among columns. A cell is empty where the
    value is none of its column's type. Whole numbers of others stay whole, where all of them are.
    """
    types = {c.name: c.dtype for c in columns}
    others = sorted({*chain.from_iterable(rows)} - {*types, *left_out})
    arrays: dict[str, Array] = {}
    for name in (*types, *others):
        values = [row.get(name) for row in rows]
        kinds = {*map(type, values)} - {type(None)}
        dtype = types.get(name) or _DTYPES.get(frozenset(kinds), TEXT)
        if not kinds <= {_PLAIN[dtype]} or kinds == {int}:
            values = [_fit(value, dtype) for value in values]
        if dtype == NUMBER:
            array = _numbers(np.array(values, dtype=float))  # None becomes NaN
        elif dtype == TEXT:
            shown = {value: value and one_line(value) for value in {*values}}
            array = pd.Series([shown[value] for value in values], dtype=dtype).array
        else:
            array = pd.Series(values, dtype=dtype).array
        arrays[one_line(name)] = array
    return pd.DataFrame(arrays, index=pd.RangeIndex(len(rows)))


def _numbers(values: NDArray[np.float64]) -> Array:
    """A column of numbers, empty where one is of no measurement."""
    sizes = np.where(values, abs(values), 1)
    return pd.arrays.FloatingArray(values, ~((sizes <= _LARGEST) & (sizes >= 1 / _LARGEST)))


def _fit(value: Any, dtype: str) -> Any:
    """A value as a column of this type takes it; None where it is something else."""
    if dtype == TEXT:
        return None if value is None else str(value)
    if type(value) is int and dtype in (COUNT, NUMBER):
        return _PLAIN[dtype](value) if abs(value) < _TOO_LARGE else None
    return value if type(value) is _PLAIN[dtype] else None


def records(table: pd.DataFrame) -> list[Row]:
    """The rows of a table as Python has them, with None for what is not there."""
    names = [str(name) for name in table.columns]
    columns = (c.astype(object).where(c.notna(), None).tolist() for _, c in table.items())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def save_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV; raises UsageError where that cannot be done.

    A text that a spreadsheet would take for a formula gets an apostrophe before it: names and
    messages come from logs, which anybody may have written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")  # of tables of thousands pandas' own is slow
    writer.writerow(map(_cell, table.columns))
    writer.writerows(map(_cell, row.values()) for row in records(table))
    save(path, text.getvalue())


def _cell(value: Any) -> Any:
    """A value as a spreadsheet shows it."""
    text = value if type(value) is str else ""
    is_formula = text.startswith(_FORMULA) and not text.lstrip("-").isdecimal()
    return f"'{text}" if is_formula else value


def read_table(path: Path, columns: tuple[Column, ...], within: Path | None = None) -> pd.DataFrame:
    """A table that save_table wrote, with every column; empty where there is no file.

    within: a folder that a link must not lead out of. Raises UsageError for what is no such table.
    """
    if within and not is_there(path):
        return frame([], columns)
    types = {c.name: c.dtype for c in columns}
    options: Any = {"dtype_backend": "numpy_nullable", "keep_default_na": False, "na_values": [""]}
    try:
        with open_regular(path, _MAX_BYTES, within) as file:
            table = pd.read_csv(file, dtype=types, **options)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no table of jobkit"
        raise UsageError(f"{path}: {reason}") from None
    table.columns = [_plain(str(name)) for name in table.columns]
    for name in table.columns[table.dtypes == TEXT]:
        if table[name].str.startswith("'").any():
            table[name] = table[name].map(_plain, na_action="ignore").astype(TEXT)
    for name in table.columns[table.dtypes == NUMBER]:
        table[name] = _numbers(table[name].to_numpy(float, na_value=np.nan, copy=True))
    for name in types.keys() - {*table.columns}:
        table[name] = pd.Series(pd.NA, index=table.index, dtype=types[name])
    return table[[*types, *(name for name in table.columns if name not in types)]]


def _plain(text: str) -> str:
    """The text before _cell put an apostrophe before it."""
    return text[1:] if text.startswith(tuple(f"'{sign}" for sign in _FORMULA)) else text


def save(path: Path, text: str) -> None:
    """Write a file whole; raises UsageError where that cannot be done."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
