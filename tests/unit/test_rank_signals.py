"""A command gets each signal of its step once, however Slurm sends it; srun is a stub."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.stub_srun import JOB, SRUN, Kit

# Prints what it gets; the other warning ends it. It sleeps for moments, as a signal that comes just
# before Python's sleep begins is handled after it.
COUNTS = """
import os, signal, sys, time
for name in ("USR2", "TERM"):
    signal.signal(signal.Signals["SIG" + name], lambda n, _: os.write(1, b"%d\\n" % n))
def end(*_):
    os.write(1, b"end\\n")
    os._exit(75)
signal.signal(signal.SIGUSR1, end)
os.write(1, b"ready %d %s\\n" % (os.getpid(), ascii(sys.argv[1]).encode()))
while True:
    time.sleep(0.05)
"""
# What of torchrun counts here: each rank is in a session of its own, and TERM goes to all of it; it
# replaces words by its own values.
TORCHRUN = """
import os, signal, string, subprocess, sys, time
words = sys.argv[sys.argv.index("--no-python") + 1 :]
words = [string.Template(word).safe_substitute(local_rank="0") for word in words]
rank = subprocess.Popen(words, env={**os.environ, "RANK": "0"}, start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: os.killpg(rank.pid, signal.SIGTERM))
while rank.poll() is None:
    time.sleep(0.05)
sys.exit(rank.returncode)
"""


# Ends as torchrun does once it has handed TERM on: by an exception, which names the signal.
ENDED = """
class Ended(Exception):
    sigval = signal.SIGTERM
os.killpg(rank.pid, signal.SIGTERM)
rank.wait()
raise Ended
"""
THREADS = "[[ $OMP_NUM_THREADS == $(env -u OMP_NUM_THREADS nproc) ]] || exit 3; "  # one rank: all
SAVES = THREADS + "trap 'exit 75' TERM; echo ready; while :; do sleep 0.05; done"


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def with_torchrun(folder: Path, text: str) -> tuple[Kit, dict[str, str]]:
    """A kit whose Python has this module for torchrun, and the variables of a job of one task."""
    module = folder / "fake" / "torch" / "distributed" / "run.py"
    module.parent.mkdir(parents=True)
    module.write_text(text)
    for package in module.parents[:2]:
        (package / "__init__.py").touch()
    return Kit(folder), {**JOB, "SLURM_NTASKS": "1", "PYTHONPATH": str(folder / "fake")}


# Slurm with proctrack/cgroup signals the task alone, with proctrack/pgid its process group.
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["cgroup", "pgid"])
@pytest.mark.parametrize("launcher", ["srun", "torchrun", "once"])
def test_a_signal_of_the_step_reaches_the_command_once(
    tmp_path: Path, launcher: str, send: Callable[[int, int], None]
) -> None:
    run, one = with_torchrun(tmp_path, TORCHRUN)
    (tmp_path / "srun").write_text(SRUN.replace('"$@" &', 'setsid "$@" &'))
    words = [
        "--launcher",
        launcher,
        "--no-auto",
        "--",
        sys.executable,
        "-c",
        COUNTS,
        "$$local_rank",
    ]
    with subprocess.Popen(
        run.words(*words), env=run.environ(**one), stdout=subprocess.PIPE, text=True, cwd=run.folder
    ) as process:
        assert process.stdout
        lines = (line for line in process.stdout if not line.startswith("[jobkit]"))
        ready, pid, word = next(lines).split()
        assert (ready, word) == ("ready", "'$$local_rank'")
        task = shell = parent(parent(int(pid)))
        if launcher == "torchrun":
            task = parent(shell)
        for signum in (signal.SIGUSR2, signal.SIGTERM):
            send(task, signum)
            assert next(lines) == f"{signum.value}\n"
        # After whatever the shell still had to hand on.
        os.kill(shell, signal.SIGUSR1)
        assert list(lines) == ["end\n"]
        assert process.wait(300) == 75
    assert run.outcome()["status"] == "preempted"


def test_ranks_that_save_at_term_under_torchrun_are_preempted(tmp_path: Path) -> None:
    loop = TORCHRUN[: TORCHRUN.index("signal.signal")]
    waits = loop.replace("words, env", "words, stdout=-1, env") + "rank.stdout.readline()\n"
    run, one = with_torchrun(tmp_path, waits + ENDED)
    done = run("--launcher", "torchrun", "--no-auto", "--", "bash", "-c", SAVES, **one)
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr
    assert run.outcome()["status"] == "preempted"
