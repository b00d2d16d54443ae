"""How the analysis writes its files and reads its tables; jobkit.paths has their names."""

from pathlib import Path

import pandas as pd

from jobkit.analysis.tables.column import TEXT, Column
from jobkit.analysis.tables.frames import empty_column, frame, plain_values
from jobkit.errors import UsageError
from jobkit.files import is_there, open_regular
from jobkit.paths import write_whole

_MOST_BYTES = 1 << 31  # of a table
_FORMULA = ("=", "+", "-", "@")


def save_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV; raises UsageError where that cannot be done.

    A text that a spreadsheet would take for a formula gets an apostrophe before it: names and
    messages come from logs, which anybody may have written.
    """
    safe = table.rename(columns=lambda name: _safe(str(name)))
    for name in safe.columns[safe.dtypes == TEXT]:
        texts = plain_values(safe[name])
        safe[name] = pd.Series([text and _safe(text) for text in texts], dtype=TEXT)
    save(path, safe.to_csv(index=False, lineterminator="\n"))


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


def _safe(text: str) -> str:
    """A text that a spreadsheet takes for no formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def save(path: Path, text: str) -> None:
    """Write a file whole; raises UsageError where that cannot be done."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
