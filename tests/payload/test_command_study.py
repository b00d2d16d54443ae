"""Studies of a user's own program on this machine: from run_benchmarks.py to tables and report."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.analysis.collect.results import collect
from jobkit.analysis.report.report import write_report
from jobkit.spec.study import Plan
from support.place import ROOT
from support.training_programs import PLAIN, PRINTS

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
[parameters]
note = "it's $HOME"
batch = "{{total / ranks}}"
[sweep]
total = [8, 12]
[work]
unit = "images"
per_step = "{{total}}"
scaling = "strong"
"""
PRINTS_STUDY = """
name = "prints"
command = ["{python}", "{program}"]
gpus = [1, 2]
pattern = "nanogpt"
auto = false
[work]
unit = "tokens"
per_step = 1000
scaling = "strong"
"""


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "my logs"))
    return tmp_path / "my logs"


def bench(*words: str, cwd: Path = ROOT, script: str = "run_benchmarks.py") -> str:
    """What a script of the top level says, which succeeds."""
    argv = [sys.executable, str(ROOT / script), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1200, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reported(name: str) -> Path:
    """The folder of a study, with its tables and report."""
    results = collect(name)
    write_report(results, [])
    return results.folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return sorted(csv.DictReader(file), key=lambda row: int(row["world_size"]))


def test_a_study_file_becomes_rows_that_are_ok(logs: Path, tmp_path: Path) -> None:
    program = tmp_path / "my programs" / "train it.py"
    program.parent.mkdir()
    program.with_name("beside.py").touch()
    program.write_text(PROGRAM)
    file = tmp_path / "mine.toml"
    file.write_text(STUDY.format(python=sys.executable, program=program))
    bench("--site", "local", "--study", str(file))
    plan = Plan.read(logs / "mine" / "plan.json")
    for run_id, spec in plan.runs.items():
        seen = sorted((plan.paths.run(run_id).folder).glob("rank-*"))
        assert len(seen) == spec.world_size
        batch = spec.parameters["total"] // spec.world_size
        words = [f"--batch={batch}", "--note=it's $HOME"]
        assert all(json.loads(path.read_text()) == words for path in seen)
    assert "none to start" in bench("--site", "local", "--study", str(file))
    bench("mine", script="collect_results.py", cwd=tmp_path)  # from another folder
    table = rows(plan.paths.results)
    assert [row["status"] for row in table] == ["ok"] * 4
    assert [row["world_size"] for row in table] == ["1", "1", "2", "2"]
    assert len({row["series"] for row in table}) == 2


def test_a_program_that_only_prints_is_read_by_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    file = tmp_path / "study.toml"
    file.write_text(PRINTS_STUDY.format(python=sys.executable, program=tmp_path / "train.py"))
    bench("--site", "local", "--study", str(file))
    folder = reported("prints")
    table = rows(folder / "results.csv")
    assert [float(row["throughput"]) for row in table] == pytest.approx([1e4, 2e4])
    seen = {(row["throughput_source"], row["throughput_unit"]) for row in table}
    assert seen == {("pattern nanogpt", "tokens/s")}
    (two,) = [row for row in rows(folder / "scaling.csv") if row["world_size"] == "2"]
    assert float(two["efficiency"]) == pytest.approx(1.0)
    assert two["time_of"] == "100,000 tokens"
    assert "tokens/s" in (folder / "report.html").read_text()


def test_a_torch_program_is_measured_as_it_is(tmp_path: Path) -> None:
    """Nothing is said of what a step is, and the program knows of nothing."""
    (tmp_path / "train.py").write_text(PLAIN)
    words = ["--site", "local", "--name", "plain", "--gpus", "2", "--", sys.executable, "train.py"]
    bench(*words, cwd=tmp_path)
    (row,) = rows(reported("plain") / "results.csv")
    assert (row["world_size"], row["status"]) == ("2", "ok")
    assert (row["throughput_source"], row["throughput_unit"]) == ("auto", "samples/s")
    assert float(row["throughput"]) > 0
