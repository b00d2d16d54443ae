"""How the analysis writes its files; jobkit.paths has their names."""

from pathlib import Path

import pandas as pd

from jobkit.analysis.tables.column import NUMBER, TEXT
from jobkit.errors import UsageError
from jobkit.paths import write_whole

_FORMULA = ("=", "+", "-", "@")


def save_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV; raises UsageError where that cannot be done.

    A text that a spreadsheet would take for a formula gets an apostrophe before it: names and
    messages come from logs, which anybody may have written.
    """
    safe = table.rename(columns=lambda name: f"'{name}" if name.startswith(_FORMULA) else name)
    for name, column in safe.items():
        if column.dtype == TEXT and (formulas := column.str.startswith(_FORMULA, na=False)).any():
            safe[name] = column.where(~formulas, "'" + column)
        elif column.dtype == NUMBER:  # the same text in two thirds of the time
            safe[name] = column.to_numpy(float, na_value=float("nan"))
    save(path, safe.to_csv(index=False, lineterminator="\n"))


def save(path: Path, text: str) -> None:
    """Write a file whole; raises UsageError where that cannot be done."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
