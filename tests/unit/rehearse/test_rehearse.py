"""A rehearsal's parts, without Slurm: bad words, what a simulated rank leaves, what grows."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobkit.errors import NotStarted
from jobkit.metric.reader import read_file
from jobkit.outcome.status import RunState
from jobkit.rehearse import cli
from jobkit.rehearse.growth import exponent, faster, files_of, table, timed
from support.fake_study import make_plan
from support.place import ROOT

STAND_IN = [sys.executable, "-m", "jobkit.rehearse.standin"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "257", "--ranks-per-node", "4"], "at most 256"),
        (["--nodes", "0", "--ranks-per-node", "4"], "1 or more"),
        (["--nodes", "2", "--ranks-per-node", "many"], "whole number"),
        (["--nodes", "2", "--ranks-per-node", "257"], "at most 256"),
        (["--nodes", "2"], "--ranks-per-node"),
        (["--nodes", "2", "--ranks-per-node", "2"], "the minicluster in"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, words: list[str], said: str
) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("JOBKIT_MINICLUSTER_DIR", str(tmp_path))  # one that has no nodes
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        code = cli.main(words)
    except SystemExit as stop:  # argparse's way
        code = stop.code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    err = capsys.readouterr().err
    assert code == 2
    assert err.count("\n") == 1
    assert said in err
    assert not list(tmp_path.glob("logs/*"))


def test_more_ranks_than_the_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "MIB_OF_A_RANK", 10**9)
    with pytest.raises(cli.UsageError, match="at most 0 ranks"):
        cli.check(2, 2)


def test_sizes_have_several_nodes() -> None:
    assert [cli.sizes(nodes) for nodes in (1, 2, 5, 256)] == [[1], [2], [2, 5], [32, 64, 128, 256]]


def test_what_grows_faster_than_the_job_is_named() -> None:
    rows = {"files": [10, 40], "square": [1, 16], "fixed": [3.0, 3.0], "short, CPU s": [0.1, 9.0]}
    assert exponent([4, 16], rows["files"]) == 1.0
    assert exponent([4, 16], [0, 5]) is None
    assert exponent([4], [5]) is None
    assert faster([4, 16], rows) == ["square"]
    assert faster([4, 16], {"long, CPU s": [2.0, 32.0]}) == ["long, CPU s"]
    lines = table(["1x4", "4x4"], [4, 16], rows).splitlines()
    assert lines[0] == "|  | 4 (1x4) | 16 (4x4) | exponent |"
    assert lines[3] == "| square | 1 | 16 | 2.00 |"


def test_a_step_that_fails_says_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cost = timed([sys.executable, "-c", "print('fine')"], log)
    assert cost.wall_s > 0 < cost.cpu_s
    code = "import sys; print('jobkit: error: no such size'); sys.exit(2)"
    with pytest.raises(NotStarted, match="failed: no such size"):
        timed([sys.executable, "-c", code, "run"], log)
    assert files_of(tmp_path) == (1, pytest.approx(log.stat().st_size / 2**20))


def test_a_job_that_gets_no_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,), repeats=1)
    moments, ended = iter(range(0, 10**6, 300)), []
    fake = SimpleNamespace(monotonic=lambda: next(moments), sleep=lambda _: None)
    state = RunState(status="pending", reason="Slurm job 7: Resources")
    looks = SimpleNamespace(look=lambda: dict.fromkeys(plan.runs, state))
    monkeypatch.setattr(cli, "time", fake)
    monkeypatch.setattr(cli, "States", lambda _: looks)
    monkeypatch.setattr(cli, "timed", lambda words, _: ended.append(words[-2:]))
    with pytest.raises(NotStarted, match="has not started for 1200 s: Slurm job 7: Resources"):
        cli.wait(plan)
    assert ended == [["cancel", "s"]]


def _environment(run: Path, rank: int) -> dict[str, str]:
    """What run.sh gives a rank."""
    run.mkdir(exist_ok=True)
    names = {"JOBKIT_RUN_DIR": run, "JOBKIT_RUN_ID": "r", "JOBKIT_STUDY": "s"}
    names |= {"JOBKIT_ATTEMPT": 0, "RANK": rank, "WORLD_SIZE": 2, "PYTHONPATH": ROOT / "src"}
    return os.environ | {name: str(value) for name, value in names.items()}


def test_a_stand_in_writes_a_ranks_records_and_takes_the_stop_signal(tmp_path: Path) -> None:
    env = _environment(tmp_path / "r", 1)
    done = subprocess.run([*STAND_IN, "--steps", "7"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[simulated] rank 1: ")
    file = tmp_path / "r" / "metrics" / "0.r1.jsonl"
    with file.open("rb") as stream:
        windows = [r for r in read_file(stream) if isinstance(r, dict) and r["kind"] == "window"]
    assert sum(r["steps"] for r in windows) == 7

    env = _environment(tmp_path / "stopped", 0)
    with subprocess.Popen([*STAND_IN, "--steps", "1000000"], env=env, stdout=-3) as process:
        deadline = time.monotonic() + 600
        first = tmp_path / "stopped" / "metrics" / "0.jsonl"
        while not (first.exists() and b'"window"' in first.read_bytes()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(600) == 75
    assert b'"preempted"' in first.read_bytes()
