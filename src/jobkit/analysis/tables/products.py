"""How the analysis writes its files; jobkit.paths has their names."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from jobkit.analysis.tables.column import TEXT
from jobkit.analysis.tables.frames import plain_values
from jobkit.cores import in_order
from jobkit.errors import UsageError
from jobkit.paths import write_whole

_ROWS, _SHARE = 1000, 10  # of a piece of a table, and the pieces that are worth a process
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
