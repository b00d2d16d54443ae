"""`python -m jobkit launch` and `from jobkit import launch`: run.sh's line, its exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit import LaunchConfig
from jobkit.errors import UsageError
from jobkit.launch import one
from support.place import ROOT

PROGRAM = """
import os, sys
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {sys.argv[1:]}\\n".encode())
sys.exit(3 if "fail" in sys.argv else 0)
"""
FROM_PYTHON = """
import sys
from jobkit import LaunchConfig, launch
from jobkit import launch as again
assert launch is again
config = LaunchConfig(command=(sys.argv[1], "a b", "--lr=1"), nproc_per_node=2)
sys.exit(launch(config))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path / "train.py"


def called(program: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    env |= {"JOBKIT_LOGS": str(program.parent / "logs"), "JOBKIT_PYTHON": sys.executable}
    argv = [sys.executable, *words]
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=480, cwd=program.parent
    )


SAID = ["rank 0 of 2: ['a b', '--lr=1']", "rank 1 of 2: ['a b', '--lr=1']"]


# The first attempt ends as it is asked to, and says that it can be.
WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
open(os.environ["JOBKIT_RUN_DIR"] + "/ready-" + os.environ["RANK"], "w").close()
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGUSR2, 75)])
def test_a_signal_to_the_caller_is_handed_on(program: Path, signum: int, code: int) -> None:
    program.write_text(WAITS)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JOBKIT_PYTHON": sys.executable}
    env["JOBKIT_LOGS"] = str(program.parent / "logs")
    argv = [sys.executable, "-c", FROM_PYTHON, str(program)]
    process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while len(list(program.parent.glob("logs/single/*/ready-*"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signum)
        assert process.wait(120) == code  # as launch() returned it
    finally:
        process.kill()
        process.communicate()


def test_the_python_of_the_ranks_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOBKIT_PYTHON", "/opt/python")
    assert LaunchConfig(command=("t.py",)).words() == ["--", "/opt/python", "t.py"]
    monkeypatch.delenv("JOBKIT_PYTHON")
    assert LaunchConfig(command=("t.py",)).words() == ["--", sys.executable, "t.py"]


def test_from_the_shell_the_code_is_the_runs(program: Path) -> None:
    own = ["-m", "jobkit", "launch", "train.py", "--nproc-per-node", "2", "--", "a b", "--lr=1"]
    done = called(program, *own)
    assert sorted(x for x in done.stdout.splitlines() if x.startswith("rank")) == SAID
    assert done.returncode == 0, done.stderr
    assert called(program, *own, "fail").returncode == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which program?"),
        (["train.py", "--nodes", "2"], "unrecognized arguments: --nodes"),
    ],
)
def test_bad_input_is_one_line_and_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = one.main(words)
    except SystemExit as end:  # argparse's way
        code = end.code
    error = capsys.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1


def test_the_line_of_run_sh() -> None:
    config = LaunchConfig(
        command=("python", "t.py"), nproc_per_node=4, nnodes=2, node_rank=1, master_addr="n0"
    )
    size = ["--nproc-per-node", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr", "n0"]
    assert config.words() == [*size, "--", "python", "t.py"]
    assert LaunchConfig(training=("--epochs", "1")).words() == ["--epochs", "1"]
    with pytest.raises(UsageError, match="list of words"):
        LaunchConfig(command="train.py --lr 1").words()
