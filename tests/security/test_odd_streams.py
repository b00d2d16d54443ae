"""Closed and full standard streams, and readers that leave: nothing is lost but what is printed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit.paths import StudyPaths
from support.fake_study import make_plan, whole_study
from support.place import ROOT

CLOSED = (">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-")
FULL = (">/dev/full", "1</dev/null")
COMMANDS = ("status s", "status s --json", "collect s", "collect s --json", "--help", "--version")


def shell(line: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, **environ},
    )


def jobkit(words: str, streams: str) -> "subprocess.CompletedProcess[str]":
    return shell(f"{sys.executable} -m jobkit {words} {streams}")


@pytest.mark.parametrize("streams", CLOSED)
@pytest.mark.parametrize("words", COMMANDS)
def test_a_closed_stream_ends_no_command(words: str, streams: str) -> None:
    plan = whole_study("s", strategies=("ddp",), gpus=(1,))
    done = jobkit(words, streams)
    assert (done.returncode, done.stderr) == (0, "")
    if words.startswith("collect"):
        for path in (plan.paths.results, plan.paths.epochs, plan.paths.scaling):
            assert path.read_text().count("\n") > 1 and "wrote" not in path.read_text()


@pytest.mark.parametrize("streams", FULL)
@pytest.mark.parametrize("words", COMMANDS)
def test_output_that_cannot_be_written_is_said_and_the_work_is_done(
    words: str, streams: str
) -> None:
    plan = whole_study("s", strategies=("ddp",), gpus=(1,))
    done = jobkit(words, streams)
    assert done.returncode == 1
    assert done.stderr.startswith("jobkit: error: standard output: ")
    assert done.stderr.count("\n") == 1
    assert plan.paths.scaling.exists() is words.startswith("collect")


@pytest.mark.parametrize("reader", ["true", "head -1", "head -c 1"])
@pytest.mark.parametrize("words", COMMANDS)
def test_a_reader_that_leaves_is_no_error(words: str, reader: str) -> None:
    whole_study("s", strategies=("ddp",), gpus=(1, 2, 4), repeats=9)
    done = jobkit(words, f"| {reader} >/dev/null; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full", "2>&1 >&- | true; exit ${PIPESTATUS}"])
def test_a_lost_error_message_keeps_its_exit_code(streams: str) -> None:
    assert jobkit("nonsense", streams).returncode == 2
    assert jobkit("status nosuch", streams).returncode == 2


def test_what_is_printed_ends_in_no_file(tmp_path: Path) -> None:
    """With handle 1 closed, the first file that is opened would get its number."""
    code = (
        "from jobkit import door, streams; import os, sys\n"
        "def main(argv):\n"
        f"    file = open({str(tmp_path / 'precious')!r}, 'w')\n"
        "    os.write(1, b'said'); os.write(2, b'said'); print('said'); return 0\n"
        "sys.exit(door.call(main, []))"
    )
    done = shell(f'{sys.executable} -c "$CODE" <&- >&- 2>&-', CODE=code)
    assert done.returncode == 0 and (tmp_path / "precious").read_text() == ""


def test_an_encoding_without_the_letters_ends_nothing(tmp_path: Path) -> None:
    logs = tmp_path / "dänisch \u2603"
    done = shell(
        f"{sys.executable} -m jobkit status nosuch; {sys.executable} -m jobkit --prefix",
        JOBKIT_LOGS=str(logs),
        PYTHONIOENCODING="ascii",
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stderr.startswith("jobkit: error: no study") and done.stderr.isascii()


def test_a_watched_study_ends_with_its_reader() -> None:
    """`status --watch | head` would update a table that nobody sees until the study ends."""
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run = plan.paths.run(next(iter(plan.runs)))
    (run.attempts / "0").mkdir(parents=True)
    run.job.write_text(f'{{"pid": {os.getpid()}, "started": 1}}')
    done = jobkit("status s --watch --interval 0.1", "| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "")


SETTINGS = "--dataset synthetic --train-samples 128 --test-samples 64 --epochs 1 --threads 1"
STUDY = "run_benchmarks.py --site local --gpus 1 --repeats 1 --name s -- sleep 1"  # not a training


@pytest.mark.parametrize("streams", ["| true; exit ${PIPESTATUS[0]}", ">&-", ">/dev/full"])
def test_a_study_goes_on_when_its_output_is_lost(streams: str) -> None:
    done = shell(f"{sys.executable} {ROOT}/{STUDY} {streams}")
    assert done.returncode == (1 if "full" in streams else 0)
    assert "Traceback" not in done.stderr
    if streams != ">&-":
        assert "the study goes on in" in done.stderr
    status = jobkit("status s --json", "")
    assert '"ok": 1' in status.stdout


def test_a_study_started_with_nohup_outlives_the_hangup(tmp_path: Path) -> None:
    command = f"trap '' HUP; exec {sys.executable} {ROOT}/{STUDY}"
    log = tmp_path / "log"
    with log.open("w") as out:
        study = subprocess.Popen(["bash", "-c", command], stdout=out, stderr=out)
        deadline = time.monotonic() + 400
        while "started:" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)  # until it follows the study
        study.send_signal(signal.SIGHUP)
        assert study.wait(200) == 0, log.read_text()
    assert "all 1 runs are ok" in log.read_text()


@pytest.mark.parametrize("streams", ["| head -1; exit ${PIPESTATUS[0]}", "<&- >&- 2>&-"])
def test_one_training_ends_well_whatever_its_output_does(tmp_path: Path, streams: str) -> None:
    words = f"--nproc-per-node 1 --run-dir {tmp_path}/run --strategy single --device cpu"
    done = shell(f"bash {ROOT}/run.sh {words} {SETTINGS} {streams}", JOBKIT_PYTHON=sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
    outcome = StudyPaths(tmp_path).run("run").outcome(0).read_text()
    assert '"status": "ok"' in outcome
    records = StudyPaths(tmp_path).run("run").metrics(0).read_text()
    assert records.count('"kind":"run_end"') == 1
