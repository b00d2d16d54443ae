"""What runs and commands wrote: records of metrics files, and rows of CSV files."""

import csv
from pathlib import Path

from jobkit.metric.kinds import Record
from jobkit.metric.reader import read_file


def records_of(path: Path, kind: str = "") -> list[Record]:
    """The records of a file, if it is there, all or of a kind; every line of it must be one."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        found = list(read_file(file))
    assert all(isinstance(record, dict) for record in found), found
    return [r for r in found if isinstance(r, dict) and kind in ("", r["kind"])]


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by their columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
