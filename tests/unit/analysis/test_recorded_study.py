"""A study that an earlier version recorded (commit f04e1e4) has the tables that it had then."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from jobkit.analysis.collect.results import collect
from support.place import ROOT

RECORDED = ROOT / "tests" / "golden" / "recorded"


@pytest.mark.parametrize(("table", "rows"), [("results.csv", 2), ("epochs.csv", 4)])
def test_the_old_columns_are_as_they_were(tmp_path: Path, table: str, rows: int) -> None:
    folder = tmp_path / "recorded"
    shutil.copytree(RECORDED, folder)
    for name in ("results.csv", "epochs.csv"):
        (folder / name).unlink()
    collect(folder)
    before, now = (pd.read_csv(f / table, dtype=str) for f in (RECORDED, folder))
    assert len(before) == rows
    assert set(before.columns) <= set(now.columns)
    keys = [k for k in ("run_id", "epoch") if k in before.columns]
    before, now = (t.sort_values(keys, ignore_index=True) for t in (before, now))
    pd.testing.assert_frame_equal(now[list(before.columns)], before)
