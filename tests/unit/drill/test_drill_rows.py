"""The drill on this machine with commands, and its parts: rows of what a run left, bad words."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jobkit.drill import cli, faults, places, programs
from jobkit.drill.programs import Program, began
from jobkit.drill.run import Drill, FaultRun, impossible
from jobkit.launch.site import Site
from jobkit.outcome.state import run_state
from jobkit.paths import RunPaths, StudyPaths, write_json
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun
from support.records import rows_of
from support.refusals import refusal
from support.training_programs import UNTIL_HIT

PROGRAM, TRAINING = Program(words=("python", "train.py")), Program()
GOOD = faults.Row(
    fault="kill", where="n1,n2", first_status="failed", evidence="task 1: Killed",
    final_status="ok", attempts=2, detected_s=1.25, restart_s=6.5, iterations_lost=5,
    same_parameters=True, orphans=0,
)  # fmt: skip
# It goes on to its end when it is asked to stop.
DEAF = UNTIL_HIT.replace("75 if stop else 0", "0")


@pytest.fixture
def drilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Drill a program on this machine, hit once its ranks are there; exit code, rows by fault."""
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "my logs"))

    def there(_: Program, paths: RunPaths, __: places.Started) -> bool:
        return len(list(paths.folder.glob("ready-?"))) == 2

    monkeypatch.setattr(Program, "reached", there)

    def drill(text: str, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
        script = tmp_path / "my train.py"
        script.write_text(text)
        code = cli.main(["--local", *options, "--", sys.executable, str(script)])
        path = tmp_path / "my logs" / "drill" / "drill.csv"
        return code, {row["fault"]: row for row in rows_of(path)} if path.exists() else {}

    return drill


def test_a_command_that_comes_back_is_good(drilled, capfd) -> None:
    code, rows = drilled(UNTIL_HIT, "--faults", "kill", "warning", "scancel")
    assert code == 0, capfd.readouterr()
    assert "2 of 2 faults: recovered\n" in capfd.readouterr().out
    for name, first in (("kill", "failed"), ("warning", "preempted")):
        row = rows[name]
        assert (row["first_status"], row["final_status"], row["attempts"]) == (first, "ok", "2")
        assert (row["where"], row["orphans"], row["note"]) == ("here", "0", ""), row
        assert row["same_parameters"] == "" and row["detected_s"] and not row["iterations_lost"]
    assert rows["kill"]["evidence"] == "rank 1: ended by SIGKILL"
    assert rows["scancel"]["note"] == "not possible here: it needs Slurm"


def test_a_command_that_was_not_hit_is_not_good(drilled, capfd) -> None:
    code, rows = drilled(DEAF, "--faults", "warning")
    assert code == 4 and rows["warning"]["first_status"] == "ok"
    assert "as if there had been no fault" in rows["warning"]["note"]
    code, _ = drilled(DEAF, "--faults", "warning", "--patience", "0.01")
    said = "not reached within 0.01 s; give a longer --patience"
    assert code == 2 and said in capfd.readouterr().err


def test_a_fault_that_fails_outside_is_a_row_like_any_other(tmp_path, monkeypatch) -> None:
    def start(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(places.LocalPlace, "start", start)
    drill = Drill(place=places.LocalPlace(), study=StudyPaths(tmp_path), program=PROGRAM,
                  patience_s=300, say=print, halted=threading.Event())  # fmt: skip
    row = FaultRun(drill, faults.FAULTS["kill"]).run()
    assert row.note == "no room" and row.possible and not row.good


def test_when_a_command_is_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After half of its time, in which that in a queue does not count."""
    for ends, took_s in (([1003.0, 1140.0], 40.0), ([1003.0], 3.0), ([], 0.0)):
        assert places.Started(begins=[1000.0, 1100.0], ends=ends).took_s == took_s
    timed, now = replace(PROGRAM, after_s=20), time.time()
    for begins, there in (([], False), ([now + 1000], False), ([now - 21], True)):
        assert timed.reached(RunPaths(Path()), places.Started(begins=begins)) is there
    monkeypatch.setattr(FaultRun, "run_reference", lambda _: 40.0)
    monkeypatch.setattr(Drill, "_one", lambda *_: GOOD)
    drill = Drill(place=places.LocalPlace(), study=StudyPaths(tmp_path / "d"), program=PROGRAM,
                  patience_s=300, say=print, halted=threading.Event())  # fmt: skip
    assert drill.run([faults.FAULTS["kill"]]) == [GOOD] and drill.program.after_s == 20


def test_one_rank_is_signalled_or_all() -> None:
    """Of ranks 0 and 1, and of a process that is no rank."""
    env, started = {**os.environ, places.MARK: "one-rank"}, []
    for rank in ({"RANK": "0"}, {"RANK": "1"}, {}):
        wait = [sys.executable, "-c", "input()"]
        started.append(subprocess.Popen(wait, env=env | rank, stdin=subprocess.PIPE))
    for index, number, ranks in ((1, signal.SIGKILL, ["1"]), (0, signal.SIGTERM, ["0", "1"])):
        assert places.signal_marked("one-rank", number, ranks) == 1
        assert started[index].wait(300) == -number
    assert places.end_marked("one-ran", 0.0) == 0
    assert places.end_marked("one-rank", 0.0) == 1 and started[2].wait(300) == -9
    assert places.end_marked("one-rank", 5.0) == 0


# --- rows, by what a run left ---


def leave(paths: RunPaths, attempt: int, *checkpoints: tuple[str, int]) -> None:
    run = FakeRun(paths.folder.parent, paths.folder.name, RunSpec(), attempt)
    run.writer.write("startup", total_s=3.0)
    for action, iteration in checkpoints:
        run.writer.write("checkpoint", action=action, iteration=iteration)


def test_iterations_lost_are_those_done_again(tmp_path: Path) -> None:
    for number, (saved, then, lost) in enumerate((
        ([10, 20], [("loaded", 20)], 5),
        ([10, 20, 26], [("loaded", 26)], 0),
        ([10, 20], [("rejected", 20), ("loaded", 10)], 15),
        ([], [], 25),
    )):  # fmt: skip
        paths = RunPaths(tmp_path / str(number))
        leave(paths, 0, *(("saved", n) for n in saved))
        assert TRAINING.redone(paths) is None  # there was no other attempt
        leave(paths, 1, *then)
        assert TRAINING.redone(paths) == lost
        assert time.time() - 300 < (began(paths, 1) or 0) < time.time() + 1


def test_the_first_attempt_is_told_as_if_there_had_been_no_other(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "kill")
    leave(paths, 0, ("saved", 20))
    leave(paths, 1)
    write_json(paths.outcome(1), {"status": "ok"})
    paths.log.write_text(
        "[jobkit] start: attempt 0 of kill on n1\nsrun: error: n2: task 1: Killed\n"
        "[jobkit] start: attempt 1 of kill on n1\ndone\n"
    )
    assert run_state(paths).status == "ok"
    state = faults.first_state(paths, None)
    assert (state.status, state.attempts) == ("failed", 1)
    assert state.evidence == "srun: error: n2: task 1: Killed"


def test_what_is_good() -> None:
    """Also what cannot be seen from here, is not compared, or is not possible here."""
    unseen = {"orphans": None}, {"same_parameters": None}, {"where": "", "final_status": ""}
    for changed in ({}, *unseen):
        assert replace(GOOD, **changed).good
    differs = {"same_parameters": False}
    for changed in ({"final_status": "failed"}, {"note": "x"}, differs, {"orphans": 1}):
        assert not replace(GOOD, **changed).good


def test_parameters_that_could_not_be_compared_are_noted(monkeypatch) -> None:
    said = 'torch warns\n{"run": "/d/kill", "same": false}\n{"run": "/d/raise", "same": null}\n'
    answer = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(programs.subprocess, "run", lambda *_, **__: answer)
    away, unknown = faults.Row(fault="term", note="away"), replace(GOOD, fault="raise")
    rows = TRAINING.compared([GOOD, unknown, replace(unknown, note="lost"), away], Path("/d/x"))
    found = [(row.same_parameters, row.note) for row in rows]
    lost = (None, "its parameters could not be compared")
    assert found == [(False, ""), lost, (None, "lost"), (None, "away")]


def test_the_table_and_the_csv_have_every_row(tmp_path: Path) -> None:
    rows = [GOOD, faults.Row(fault="scancel", note="not possible here")]
    faults.write_csv(rows, tmp_path / "drill.csv")
    kill, scancel = rows_of(tmp_path / "drill.csv")
    assert (kill["fault"], kill["detected_s"], kill["same_parameters"]) == ("kill", "1.250", "yes")
    assert (scancel["orphans"], scancel["note"]) == ("", "not possible here")
    console = Console(width=100, record=True, file=io.StringIO())
    faults.show(rows, console)
    line = r"(?m)^kill +failed +ok, 2 attempts +1\.2 s +6\.5 s +5 +yes +0"
    text = console.export_text()
    assert re.search(line, text) and "scancel: not possible here" in text


# --- places ---


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> places.SlurmPlace:
    monkeypatch.setenv("JOBKIT_MINICLUSTER_DIR", str(tmp_path))
    answer = subprocess.CompletedProcess([], 0, "batch\nurgent\n", "")
    monkeypatch.setattr(places, "slurm", lambda *_, **__: answer)
    return places.SlurmPlace(Site(name="mini"), {}, None)


def test_why_a_fault_is_not_possible(mini: places.SlurmPlace) -> None:
    def why(place: places.Place, name: str) -> str:
        return impossible(place, PROGRAM, faults.FAULTS[name])

    here = places.LocalPlace()
    assert why(here, "scancel") == why(here, "preemption") == "it needs Slurm"
    assert [name for name in faults.FAULTS if why(mini, name)] == ["raise", "time-limit"]
    assert why(here, "kill") == ""
    mini.urgent, mini.sees_processes = None, False  # as on a cluster's login node
    assert "--urgent-partition" in why(mini, "preemption")
    assert "needs --local or --minicluster" in why(mini, "kill")
    assert not impossible(mini, TRAINING, faults.FAULTS["time-limit"])


def test_the_job_that_preempts_is_charged_as_the_others(mini, monkeypatch) -> None:
    called: list[list[str]] = []
    answer = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(places, "slurm", lambda words: called.append(words) or answer)
    mini.site = Site(name="s", account="of-the-site", qos="high")
    mini.preempt(["n1"])
    mini.options = {"account": "given"}
    mini.preempt(["n1"])
    charged = [[w for w in words if w.startswith(("--account", "--qos"))] for words in called]
    assert charged == [["--account=of-the-site", "--qos=high"], ["--account=given", "--qos=high"]]


def shown(state: str, restarts: int = 0) -> str:
    return f"JobId=7 JobState={state} Restarts={restarts} ExitCode=0:0 NodeList=n[1-2]\n"


STEADY = [
    *(shown("PENDING"), shown("RUNNING"), ""),  # the controller is away for a moment
    *(shown("RUNNING"), shown("PREEMPTED"), shown("PENDING")),
    *(shown("RUNNING", 1), shown("COMPLETING", 1), shown("COMPLETED", 1)),
]
FORGOTTEN = [shown("RUNNING"), "", "?"]  # as some sites' controllers do, seconds after its end


@pytest.mark.parametrize(
    ("answers", "begins", "end"), [(STEADY, 2, "COMPLETED"), (FORGOTTEN, 1, "job not found")]
)
def test_a_jobs_starts_and_ends_are_noted(monkeypatch, answers, begins, end) -> None:
    """By what `scontrol show job` says, one after the other; ? for a job that it does not know."""
    rest = iter(answers)

    def answer(words: list[str], **_: str) -> "subprocess.CompletedProcess[str]":
        text = "n1\nn2\n" if "hostnames" in words else next(rest)
        error = "slurm_load_jobs error: Invalid job id specified\n" if text == "?" else ""
        return subprocess.CompletedProcess(words, int(text == "?"), text, error)

    monkeypatch.setattr(places, "slurm", answer)
    job = places.SlurmStart(job_id="7")
    assert [job.look() for _ in answers] == [True] * (len(answers) - 1) + [False]
    assert (len(job.begins), len(job.ends), job.nodes) == (begins, begins, ["n1", "n2"])
    times = [at for pair in zip(job.begins, job.ends, strict=True) for at in pair]
    assert times == sorted(times) and job.over and job.end_text == f"Slurm job 7: {end}"


# --- the command ---


def test_bad_words_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    for words, said in (
        ("--faults kil", "did you mean 'kill'"),
        ("--", "-- needs a command after it"),
        ("--device cpu -- python train.py", "--device is of jobkit's own"),
        ("-A project", "--account: is for Slurm, but the runs start on this machine"),
        ("--urgent-partition high", "--urgent-partition: is for Slurm"),
        ("--faults scancel time-limit", "no fault can be injected here: scancel: it needs"),
    ):
        assert said in refusal(cli.main, ["--local", *words.split()], capsys)
    (tmp_path / "drill" / "reference").mkdir(parents=True)
    (tmp_path / "drill" / "notes").touch()
    said = refusal(cli.main, ["--local"], capsys)
    assert "drill/notes is not of a drill, which would clear" in said
    assert (tmp_path / "drill" / "notes").exists()
