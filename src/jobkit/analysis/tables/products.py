"""How the analysis writes its files and reads its tables; jobkit.paths has their names."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from jobkit.analysis.tables.column import TEXT, Column
from jobkit.analysis.tables.frames import empty_column, frame, plain_values
from jobkit.cores import in_order
from jobkit.errors import UsageError
from jobkit.files import is_there, open_regular
from jobkit.paths import write_whole

_ROWS, _SHARE = 1000, 10  # of a piece of a table, and the pieces that are worth a process
_MOST_BYTES = 1 << 31  # of a table
_FORMULA = ("=", "+", "-", "@")


def save_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV; raises UsageError where that cannot be done.

    A text that a spreadsheet would take for a formula gets an apostrophe before it: names and
    messages come from logs, which anybody may have written.
    """
    columns = [_cells(column) for _, column in table.items()]

    def text(begin: int) -> str:
        return _lines(zip(*(c[begin : begin + _ROWS] for c in columns), strict=True))

    heading = _lines([[_safe(str(name)) for name in table.columns]])
    rows = in_order(text, range(0, len(table), _ROWS), share=_SHARE)  # numbers take the time
    save(path, "".join([heading, *rows]))


def read_table(path: Path, columns: tuple[Column, ...], within: Path | None = None) -> pd.DataFrame:
    """A table that save_table wrote, with every column; empty where there is no file.

    within: a folder that a link must not lead out of. Raises UsageError for what is no such table.
    """
    if within and not is_there(path):
        return frame([], columns)
    kinds = {c.name: c.dtype for c in columns}
    try:
        with open_regular(path, _MOST_BYTES, within) as file:
            table = pd.read_csv(
                file,
                dtype=kinds,
                dtype_backend="numpy_nullable",
                keep_default_na=False,
                na_values=[""],
            )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no table of jobkit"
        raise UsageError(f"{path}: {reason}") from None
    table.columns = [_plain(str(name)) for name in table.columns]
    for name in table.columns[table.dtypes == TEXT]:
        texts = [_plain(text) if isinstance(text, str) else None for text in table[name]]
        table[name] = pd.Series(texts, dtype=TEXT)
    for name in kinds.keys() - {*table.columns}:
        table[name] = empty_column(len(table), kinds[name])
    return table[[*kinds, *(name for name in table.columns if name not in kinds)]]


def _plain(text: str) -> str:
    """The text that _safe was given."""
    return text[1:] if text.startswith(tuple(f"'{sign}" for sign in _FORMULA)) else text


def _lines(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as lines of CSV."""
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows)
    return lines.getvalue()


def _cells(column: pd.Series) -> list[Any]:
    """The values of a column as the csv module takes them; None where there is none."""
    values = plain_values(column)
    if column.dtype == TEXT:
        safe = {value: value and _safe(value) for value in {*values}}
        return [safe[value] for value in values]
    return values


def _safe(text: str) -> str:
    """A text that a spreadsheet takes for no formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def save(path: Path, text: str) -> None:
    """Write a file whole; raises UsageError where that cannot be done."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
