"""collect_results.py, plot_results.py and plot_results.sh, as a user starts them."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit.analysis.cli import collect_main, plot_main
from support.codes import code_of
from support.fake_study import FakeRun, logs, make_plan, whole_run, whole_study
from support.place import ROOT

Run = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    monkeypatch.chdir(tmp_path)


def plot_sh(*words: str, **environ: str) -> Run:
    environ = {**os.environ, "JOBKIT_PYTHON": sys.executable, **environ}
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        environ.setdefault(name, "")
    command = ["bash", str(ROOT / "plot_results.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=480)


def files(folder: Path) -> set[Path]:
    return {p.relative_to(folder) for p in folder.rglob("*")}


def half_study() -> None:
    plan = make_plan("half", strategies=("ddp",), gpus=(1, 2))
    whole_run(plan, next(iter(plan.runs)))


def not_a_plan(text: str) -> None:
    (logs() / "broken").mkdir(parents=True)
    (logs() / "broken" / "plan.json").write_text(text)


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
    "a newline": (lambda: whole_study("demo"), ["a\nb"], r"no study 'a\\nb'"),
    "a file": (half_study, ["logs/half/plan.json"], r"is a file: give the study's folder"),
    "a run": (lone_run, ["alone"], r"is the folder of one run: name its study"),
    "an empty folder": (lambda: (logs() / "e").mkdir(parents=True), ["e"], r"has no plan\.json"),
    "no JSON": (lambda: not_a_plan("{"), ["broken"], r"plan\.json is not a plan"),
    "no plan": (lambda: not_a_plan("[]"), ["broken"], r"plan\.json is not a plan"),
    "an unknown option": (half_study, ["--jsom"], r"unrecognized arguments: --jsom"),
    "two studies": (half_study, ["half", "half"], r"unrecognized arguments: half"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("main", [collect_main, plot_main])
def test_bad_input_is_one_line_and_nothing_is_written(main, case, capsys, tmp_path) -> None:
    prepare, words, expected = BAD[case]
    prepare()
    before = files(tmp_path)
    assert code_of(main, words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.match(r"(jobkit|\w+_results\.py): error: ", said.err)
    assert said.err.count("\n") == 1
    assert re.search(expected, said.err)
    assert files(tmp_path) == before


def test_figures_that_cannot_be_written_are_one_line(capsys) -> None:
    whole_study("demo", strategies=("ddp",), gpus=(1,))
    (logs() / "demo" / "figures").write_text("in the way")
    assert plot_main(["demo"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_collect_says_what_it_wrote_and_what_comes_next(capsys) -> None:
    whole_study("demo", strategies=("ddp",), gpus=(1,))
    assert collect_main(["demo"]) == 0
    said = capsys.readouterr().out
    assert "wrote logs/demo/results.csv (1 run)" in said
    assert "wrote logs/demo/epochs.csv (3 epochs)" in said
    assert "wrote logs/demo/scaling.csv (1 size)" in said
    assert said.rstrip().endswith("next: python plot_results.py logs/demo")


@pytest.mark.parametrize("given", ["demo", "logs/demo", "logs/demo/", "./logs/demo"])
def test_a_study_by_name_or_by_path(given: str) -> None:
    whole_study("demo", strategies=("ddp",), gpus=(1,))
    assert collect_main([given]) == 0
    assert (logs() / "demo" / "results.csv").exists()


def test_the_newest_study_is_the_default(capsys) -> None:
    for age, name in ((100, "older"), (50, "newer"), (200, "oldest")):
        plan = whole_study(name, strategies=("ddp",), gpus=(1,))
        stamp = 1_700_000_000 - age
        os.utime(plan.paths.plan, (stamp, stamp))
    assert collect_main([]) == 0
    assert capsys.readouterr().out.startswith("newer: 1 of 1 runs ok")


def test_incomplete_is_3_and_still_collected(capsys) -> None:
    half_study()
    assert collect_main(["half"]) == 3
    assert "missing" in capsys.readouterr().out
    assert (logs() / "half" / "results.csv").exists()


def test_json_is_all_that_stands_on_the_output(capsys) -> None:
    half_study()
    log = next((logs() / "half").glob("*/train.log"))
    log.write_text(log.read_text() + "[METRIC] {torn\n")
    assert collect_main(["half", "--json"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out)["runs_ok"] == 1
    assert "1 [METRIC] line rejected" in said.err


def test_plot_without_a_finished_epoch_draws_nothing(capsys) -> None:
    make_plan("empty", strategies=("ddp",), gpus=(1, 2))
    assert plot_main(["empty"]) == 3
    said = capsys.readouterr()
    assert said.err == "logs/empty: no run has a rate (2 missing): no figure\n"
    assert not (logs() / "empty" / "figures").exists()


def test_plot_sh_wrong_usage() -> None:
    for words, environ in ((["nope"], {}), (["a", "b"], {}), ([], {"JOBKIT_PYTHON": "/no/python"})):
        done = plot_sh(*words, **environ)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
    assert plot_sh("--help").returncode == 0


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where xdg-open leaves the names of the files that it is given."""
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text(
        f'#!/bin/sh\nmkdir -p {tmp_path}/opened; touch {tmp_path}/opened/"${{1##*/}}"\n'
    )
    opener.chmod(0o755)
    monkeypatch.setenv("PATH", f"{opener.parent}:{os.environ['PATH']}")
    return tmp_path / "opened"


def test_plot_sh_collects_and_plots_with_what_follows_the_study(opened: Path) -> None:
    whole_study("demo", strategies=("ddp",), gpus=(1, 2, 4))
    done = plot_sh("demo", "--forecast", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert (logs() / "demo" / "forecast.csv").exists()
    written = done.stdout.count("wrote logs/demo/figures/")
    assert len(list((logs() / "demo" / "figures").iterdir())) == written >= 18
    assert (logs() / "demo" / "results.csv").exists()
    assert "wrote logs/demo/figures/time_per_epoch.png" in done.stdout
    assert done.stdout.endswith("wrote logs/demo/report.html\n")
    assert not opened.exists()  # there is no display


def test_plot_sh_of_an_incomplete_study_still_plots_and_ends_with_3(opened: Path) -> None:
    """And opens the report, as there is a display."""
    half_study()
    assert plot_sh("half", DISPLAY=":0").returncode == 3
    assert len(list((logs() / "half" / "figures").iterdir())) == 6
    expected = {"report.html"}
    deadline = time.monotonic() + 300  # the script does not wait for what it opens
    while {p.name for p in opened.glob("*")} != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {p.name for p in opened.glob("*")} == expected
