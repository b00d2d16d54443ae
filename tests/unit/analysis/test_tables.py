"""The tables on disk are the interface: what is read back is what was collected."""

import os
from pathlib import Path

import pandas as pd
import pytest

from jobkit.analysis.cli import plot_main
from jobkit.analysis.collect.results import OUTDATED, Results, collect
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.tables.columns import COUNT, FLAG, NUMBER, TEXT, Column
from jobkit.analysis.tables.frames import frame, read_table, records, save_table
from jobkit.errors import UsageError
from support.fake_study import logs, realistic_study, whole_study

TABLES = ("runs", "epochs", "steps", "scaling")


def same(one: Results, other: Results) -> None:
    for name in TABLES:
        left, right = getattr(one, name), getattr(other, name)
        pd.testing.assert_frame_equal(left, right, check_exact=True)
    assert one.sizes == other.sizes and one.warnings() == other.warnings()
    assert verdict(one, "GPUs") == verdict(other, "GPUs") != []


def test_the_logs_are_read_by_collect_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Options of collect hold for plot, and so do the problems that collect found."""
    plan = realistic_study(sizes=(1, "2x4"), repeats=2)
    run_id = next(iter(plan.runs))
    log = plan.paths.run(run_id).log
    log.write_text(log.read_text() + "[METRIC] {torn\n")
    collected = collect("s", accuracy=0.5)
    log.unlink()
    loaded = Results.load("s")
    same(collected, loaded)
    assert set(loaded.scaling["target_accuracy"]) == {0.5}
    assert "1 [METRIC] line rejected" in loaded.warnings()[0]
    log.write_text("a run that goes on\n")
    later = (logs() / "s" / "results.csv").stat().st_mtime + 5
    os.utime(log, (later, later))
    assert plot_main(["s", "--forecast", "1"]) == 2  # it says so before anything else
    assert OUTDATED in capsys.readouterr().err


COLUMNS = (Column("t", TEXT, ""), Column("n", COUNT, ""), Column("x", NUMBER, ""))
COLUMNS += (Column("yes", FLAG, ""),)


def test_every_value_comes_back_and_an_empty_cell_is_none(tmp_path: Path) -> None:
    rows = [
        {"t": "=1+1", "n": 2**62 + 1, "x": 0.1 + 0.2, "yes": True, "own": 1, "-sum": "a"},
        {"t": "NA", "n": -3, "x": -1e-49, "yes": False, "own": 2, "-sum": "null"},
        {"t": 'a "b", c', "x": 2.0},
        {},
    ]
    table = frame(rows, COLUMNS)
    save_table(tmp_path / "t.csv", table)
    pd.testing.assert_frame_equal(read_table(tmp_path / "t.csv", COLUMNS), table, check_exact=True)
    head, first, *_ = (tmp_path / "t.csv").read_text().splitlines()
    assert first.startswith("'=1+1,") and ",'-sum," in head, "a spreadsheet would compute it"


def test_columns_that_a_file_lacks_are_empty(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("t,other,x\na,1,\n")
    table = read_table(tmp_path / "t.csv", COLUMNS)
    assert records(table) == [{"t": "a", "n": None, "x": None, "yes": None, "other": 1}]


def test_what_is_no_table_is_one_error_and_a_link_out_of_the_study_is_not_read(tmp_path) -> None:
    whole_study(strategies=("ddp",), gpus=(1,))
    collect("s")
    path = logs() / "s" / "epochs.csv"
    for content in (b"run_id,epoch\na,many\n", b'\xff\xfe"'):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"epochs\.csv: no table of jobkit"):
            Results.load("s")
    path.rename(tmp_path / "elsewhere.csv")
    path.symlink_to(tmp_path / "elsewhere.csv")
    with pytest.raises(UsageError, match="a link that leads out of"):
        Results.load("s")


def test_whole_numbers_of_others_stay_whole() -> None:
    rows = [{"id": 12345678901234567, "n": -3, "x": 1}, {"id": None, "n": 4, "x": 2.5}, {}]
    assert frame(rows, ()).to_csv(index=False) == "id,n,x\n12345678901234567,-3,1.0\n,4,2.5\n,,\n"


@pytest.mark.parametrize("name", ["results.csv", "figures", "report.html"])
def test_what_cannot_be_written_is_one_line(name: str, capsys) -> None:
    whole_study(strategies=("ddp",), gpus=(1,))
    in_the_way = logs() / "s" / name
    in_the_way.write_text("") if name == "figures" else in_the_way.mkdir()
    assert plot_main(["s"]) == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1
