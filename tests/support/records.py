"""What runs and commands wrote: records of metrics files, and rows of CSV files."""

import csv
from pathlib import Path

import pytest

from jobkit.metric.kinds import COMMON, KINDS, Record
from jobkit.metric.reader import read_file


def records_of(path: Path, kind: str = "") -> list[Record]:
    """The records of a file, if it is there, all or of a kind.

    Every line of it must be one, with no field that KINDS has not.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        records = [r for r in read_file(file) if isinstance(r, dict) or pytest.fail(r)]
    for record in records:
        unknown = record.keys() - {*COMMON, *KINDS[record["kind"]]}
        assert not unknown, f"add to KINDS in jobkit/metric/kinds.py: {unknown}"
    return [r for r in records if kind in ("", r["kind"])]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
