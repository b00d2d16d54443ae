"""A study's folder: closed to other users, and whole whoever reads and writes it at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd

from jobkit.analysis.collect.results import collect
from support.fake_study import logs, make_plan, whole_study
from support.place import ROOT

SIX_TIMES = """
import sys
from jobkit.analysis.collect import collect
for _ in range(6):
    results = collect("s")
print(len(results.runs), len(results.epochs), sorted(set(results.runs["status"])), results.rejected)
"""
WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from support.fake_study import FakeRun
from jobkit.spec.plan import Plan
from jobkit.paths import StudyPaths
plan = Plan.read(StudyPaths.named("s").plan)
for run_id, spec in list(plan.runs.items())[int(sys.argv[2]) :: 2]:
    run = FakeRun(plan.paths.folder, run_id, spec).begin().flush()
    for epoch in range(spec.epochs):
        run.train(epoch).flush()
        time.sleep(0.02)
    run.end()
"""


def start(code: str, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code, *words], stdout=-1, text=True)


def whole_table(path: Path) -> pd.DataFrame | None:
    """A table as it is on disk now, which must be whole; None where there is none yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    assert text.endswith("\n")
    return pd.read_csv(path)


def test_collectors_at_once_each_leave_whole_tables() -> None:
    plan = whole_study(strategies=("ddp", "fsdp"), gpus=(1, 2), repeats=5)
    expected = collect("s", write=False)
    collectors = [start(SIX_TIMES) for _ in range(3)]
    while any(c.poll() is None for c in collectors):
        for name, count in (("results.csv", len(plan.runs)), ("epochs.csv", 3 * len(plan.runs))):
            table = whole_table(plan.paths.folder / name)
            assert table is None or len(table) == count
    assert {c.stdout.read() for c in collectors if c.stdout} == {"20 60 ['ok'] ()\n"}
    assert [c.returncode for c in collectors] == [0, 0, 0]
    for path, frame in expected.tables.items():
        again = pd.read_csv(path, dtype=frame.dtypes.to_dict())
        pd.testing.assert_frame_equal(again, frame)
    assert sorted(p.name for p in plan.paths.folder.glob("*.csv*")) == [
        "epochs.csv",
        "results.csv",
        "scaling.csv",
    ]
    assert not list(plan.paths.folder.glob(".*.csv*"))


def test_a_collector_while_jobs_write_gives_a_row_for_every_run_and_no_wrong_value() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2), repeats=10, settings={"epochs": 8})
    writers = [start(WRITER, str(ROOT / "tests"), str(i)) for i in range(2)]
    seen: list[pd.DataFrame] = []
    while any(w.poll() is None for w in writers):
        results = collect("s")
        assert list(results.runs["run_id"]) == list(plan.runs)
        assert set(results.runs["status"]) <= {"missing", "running", "ok"}
        seen.append(results.epochs)
    assert [w.returncode for w in writers] == [0, 0]
    final = collect("s")
    assert final.ok and not final.rejected and not final.lost
    whole = {tuple(row) for row in final.epochs.astype(object).fillna("").itertuples(index=False)}
    assert len(whole) == 8 * len(plan.runs)
    for epochs in seen:
        assert {tuple(r) for r in epochs.astype(object).fillna("").itertuples(index=False)} <= whole
    assert any(0 < len(epochs) < len(whole) for epochs in seen)


def test_a_study_that_starts_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    """From the plan to what a job's own process makes, here with a stand-in for run.sh."""
    script = 'mkdir "$0/metrics"; touch "$0/metrics/0.jsonl"'
    before = os.umask(0)
    try:
        plan = make_plan(strategies=("ddp",), gpus=(1,))
        folder = plan.paths.run(next(iter(plan.runs))).folder
        code = "import sys, json; from jobkit.launch.task import run_one\n"
        code += "sys.exit(run_one(*json.loads(sys.argv[1])))"
        words = json.dumps([str(folder), ["bash", "-c", script, str(folder)]])
        subprocess.run([sys.executable, "-c", code, words], check=True)
        results = collect("s")
    finally:
        os.umask(before)
    assert len(results.runs) == 1
    made = [p for p in [logs(), *logs().rglob("*")] if p.stat().st_mode & 0o022]
    assert made == []
    assert (folder / "metrics" / "0.jsonl").exists()


def test_a_study_that_everybody_may_write_into_is_collected_with_a_warning() -> None:
    plan = whole_study(strategies=("ddp",), gpus=(1, 2))
    assert collect("s").warnings() == []
    plan.paths.folder.chmod(0o777)
    assert collect("s").warnings() == ["s is world-writable: anybody may have changed its files"]
