"""Studies of a user's own program on this machine: from run_benchmarks.py to tables and report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.analysis.collect.results import collect
from jobkit.analysis.report.report import write_report
from jobkit.paths import StudyPaths
from jobkit.spec.study import Plan
from support.place import ROOT
from support.records import rows_of
from support.training_programs import PRINTS, PROGRAMS

PROGRAM = """
import json, os, pathlib, sys
folder, rank = pathlib.Path(os.environ["JOBKIT_RUN_DIR"]), os.environ["RANK"]
import beside  # as any script finds the modules beside it
(folder / f"rank-{rank}").write_text(json.dumps(sys.argv[1:]))
"""
STUDY = """
name = "mine"
command = ["{python}", "{program}", "--batch={{batch}}", "--note={{note}}"]
gpus = [1, 2]
pattern = "nanogpt"
[parameters]
note = "it's $HOME"
batch = "{{24 / ranks}}"
[sweep]
total = [8, 12]
[work]
unit = "images"
per_step = "{{total}}"
scaling = "strong"
"""


def bench(*words: str, cwd: Path = ROOT, script: str = "run_benchmarks.py") -> str:
    """What a script of the top level says, which succeeds."""
    argv = [sys.executable, str(ROOT / script), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1200, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(path: Path) -> list[dict[str, str]]:
    return sorted(rows_of(path), key=lambda row: int(row["world_size"]))


def test_a_study_file_becomes_rows_that_are_ok(tmp_path: Path) -> None:
    program = tmp_path / "my programs" / "train it.py"
    program.parent.mkdir()
    program.with_name("beside.py").touch()
    program.write_text(PROGRAM + PRINTS)
    file = tmp_path / "mine.toml"
    file.write_text(STUDY.format(python=sys.executable, program=program))
    bench("--site", "local", "--study", str(file))
    plan = Plan.read(StudyPaths.named("mine").plan)
    for run_id, spec in plan.runs.items():
        seen = sorted((plan.paths.run(run_id).folder).glob("rank-*"))
        assert len(seen) == spec.world_size
        words = [f"--batch={24 // spec.world_size}", "--note=it's $HOME"]
        assert all(json.loads(path.read_text()) == words for path in seen)
    assert "none to start" in bench("--site", "local", "--study", str(file))
    bench("mine", script="collect_results.py", cwd=tmp_path)  # from another folder
    table = rows(plan.paths.results)
    assert [(row["status"], row["world_size"]) for row in table] == [("ok", n) for n in "1122"]
    assert sorted(float(row["throughput"]) for row in table) == pytest.approx([80, 120, 160, 240])
    seen = {(row["throughput_source"].split(" (")[0], row["throughput_unit"]) for row in table}
    assert seen == {("pattern nanogpt", "images/s")}
    assert len({row["series"] for row in table}) == 2
    for row in rows(plan.paths.scaling)[2:]:
        assert float(row["efficiency"]) == pytest.approx(1.0)
        assert row["time_of"] == "1,000 images"


def test_a_torch_program_is_measured_as_it_is(tmp_path: Path) -> None:
    """Nothing is said of what a step is, and the program knows of nothing."""
    (tmp_path / "train.py").write_text(PROGRAMS["plain"])
    words = ["--site", "local", "--name", "plain", "--gpus", "2", "--", sys.executable, "train.py"]
    bench(*words, cwd=tmp_path)
    results = collect("plain")
    write_report(results, [])
    (row,) = rows(results.folder / "results.csv")
    assert (row["world_size"], row["status"]) == ("2", "ok")
    assert (row["throughput_source"], row["throughput_unit"]) == ("auto", "samples/s")
    assert float(row["throughput"]) > 0
    assert "samples/s" in (results.folder / "report.html").read_text()
