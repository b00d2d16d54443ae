"""collect_results.py, plot_results.py and plot_results.sh, as a user starts them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.analysis.cli import collect_main, plot_main
from jobkit.analysis.figures.style import FORMATS
from support.fake_study import FakeRun, logs, make_plan, whole_run, whole_study
from support.place import ROOT, script, until
from support.refusals import refusal


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plot_sh(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"DISPLAY": "", "WAYLAND_DISPLAY": "", **environ}
    environ = {**os.environ, "JOBKIT_PYTHON": sys.executable, **environ}
    command = ["bash", str(ROOT / "plot_results.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=480)


def files(folder: Path) -> set[Path]:
    return {p.relative_to(folder) for p in folder.rglob("*")}


def half_study() -> None:
    plan = make_plan("half", strategies=("ddp",), gpus=(1, 2))
    whole_run(plan, next(iter(plan.runs)))


def not_a_plan() -> None:
    (logs() / "broken").mkdir(parents=True)
    (logs() / "broken" / "plan.json").write_text("{")


def lone_run() -> None:
    plan = make_plan("one", strategies=("ddp",), gpus=(1,))
    (run_id,) = plan.runs
    FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin().flush()
    plan.paths.run(run_id).folder.rename(logs() / "alone")


BAD = {
    "no study at all": (lambda: None, [], r"no study in .*run_benchmarks\.py"),
    "unknown, with the nearest": (lambda: whole_study("demo"), ["deno"], r"did you mean 'demo'\?"),
    "a path that is not there": (lambda: whole_study("demo"), ["x/deno"], r"did you mean 'demo'\?"),
    "empty": (lambda: whole_study("demo"), [""], r"no study ''"),
    "a file": (half_study, ["logs/half/plan.json"], r"is a file: give the study's folder"),
    "a run": (lone_run, ["alone"], r"is the folder of one run: name its study"),
    "an empty folder": (lambda: (logs() / "e").mkdir(parents=True), ["e"], r"has no plan\.json"),
    "no JSON": (not_a_plan, ["broken"], r"plan\.json is not a plan"),
    "an unknown option": (half_study, ["--jsom"], r"unrecognized arguments: --jsom"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(case, capsys, tmp_path) -> None:
    prepare, words, expected = BAD[case]
    prepare()
    before = files(tmp_path)
    for main in (collect_main, plot_main):
        said = refusal(main, words, capsys)
        assert re.match(r"(jobkit|\w+_results\.py): error: ", said)
        assert re.search(expected, said)
    assert files(tmp_path) == before


def test_a_study_by_name_by_path_or_the_newest(capsys) -> None:
    for age, name in ((100, "older"), (50, "newer"), (200, "oldest")):
        plan = whole_study(name, strategies=("ddp",), gpus=(1,))
        stamp = 1_700_000_000 - age
        os.utime(plan.paths.plan, (stamp, stamp))
    for words, name in (([], "newer"), (["older"], "older"), (["logs/oldest/"], "oldest")):
        assert collect_main(words) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{name}: 1 of 1 runs ok")
        assert f"wrote tables to logs/{name}\n" in said
        assert said.rstrip().endswith(f"next: jobkit plot logs/{name}")


def test_incomplete_is_3_and_json_is_all_that_stands_on_the_output(capsys) -> None:
    half_study()
    log = next((logs() / "half").glob("*/train.log"))
    log.write_text(log.read_text() + "[METRIC] {torn\n")
    assert collect_main(["half", "--json"]) == 3
    content = json.loads(capsys.readouterr().out)
    assert content["runs_ok"] == 1 and "1 [METRIC] line rejected" in content["warnings"][0]
    assert (logs() / "half" / "results.csv").exists()
    make_plan("empty", strategies=("ddp",), gpus=(1, 2))
    assert plot_main(["empty"]) == 3
    assert "no run has a rate (2 missing)" in capsys.readouterr().err
    assert not (logs() / "empty" / "figures").exists()


def test_plot_sh_collects_and_plots_and_ends_with_what_collect_said(tmp_path: Path) -> None:
    """Of an incomplete study; it opens the report, as there is a display."""
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    script(opener, f'#!/bin/sh\necho "$1" >> {tmp_path}/opened\n')
    whole_study("half", strategies=("ddp",), gpus=(1, 2, 4))
    plan = make_plan("half", strategies=("ddp",), gpus=(8,))
    words = ("half", "--accuracy", "0.5", "--forecast", "8")
    path = f"{opener.parent}:{os.environ['PATH']}"
    done = plot_sh(*words, DISPLAY=":0", PATH=path)
    assert (done.returncode, done.stderr) == (3, "")
    drawn = len(list(plan.paths.figures.iterdir())) // len(FORMATS)
    assert f"wrote {drawn} figures (PNG, SVG, PDF) to logs/half/figures\n" in done.stdout
    assert drawn >= 8
    assert "0.5" in plan.paths.scaling.read_text() and plan.paths.forecast.exists()
    end = "wrote scaling.md, scaling.tex, report.html to logs/half\n"
    end += "next: open logs/half/report.html in a browser\n"
    assert done.stdout.endswith(end)
    assert done.stdout.count("\nFastest: ") == 1, "the verdict is not said twice"
    (tmp_path / "opened").touch()
    until((tmp_path / "opened").read_text)  # the script does not wait for what it opens
    assert (tmp_path / "opened").read_text() == "logs/half/report.html\n"
    for words, environ in ((["a", "b"], {}), ([], {"JOBKIT_PYTHON": "/no/python"})):
        done = plot_sh(*words, **environ)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_folder_of_others_is_refused_and_read_with_out_as_it_is(capsys) -> None:
    plan = whole_study("demo", strategies=("ddp",), gpus=(1, 2))
    plan.paths.folder.chmod(0o777)
    before = files(plan.paths.folder)
    for main in (collect_main, plot_main):
        assert main(["demo"]) == 2
        error = capsys.readouterr().err
        assert "everybody may write there" in error and "--out DIR" in error
        assert error.count("\n") == 1
        assert main(["demo", "--out", "mine"]) == 0
    assert files(plan.paths.folder) == before
    assert {p.name for p in Path("mine").iterdir()} >= {"results.csv", "report.html", "figures"}
