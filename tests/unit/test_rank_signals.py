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


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# Slurm with proctrack/cgroup signals the task alone, with proctrack/pgid its process group.
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["cgroup", "pgid"])
@pytest.mark.parametrize("launcher", ["srun", "torchrun", "once"])
def test_a_signal_of_the_step_reaches_the_command_once(
    tmp_path: Path, launcher: str, send: Callable[[int, int], None]
) -> None:
    run = Kit(tmp_path)
    (tmp_path / "srun").write_text(SRUN.replace('"$@" &', 'setsid "$@" &'))
    module = tmp_path / "fake" / "torch" / "distributed" / "run.py"
    module.parent.mkdir(parents=True)
    module.write_text(TORCHRUN)
    for folder in module.parents[:2]:
        (folder / "__init__.py").touch()
    one = {**JOB, "SLURM_NTASKS": "1", "PYTHONPATH": str(tmp_path / "fake")}
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
