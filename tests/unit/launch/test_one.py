"""`python -m jobkit launch` and launch() of Python: run.sh's line, its exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch import command
from jobkit.launch.command import LaunchConfig
from support.place import ROOT

# Each rank says what it got, and then waits or fails as the last word says.
PROGRAM = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']}: {sys.argv[1:-1]}\\n".encode())
pathlib.Path(f"printed-{rank}").touch()  # the first that fails ends the other
while sys.argv[-1] == "wait" or len([*pathlib.Path().glob("printed-*")]) < 2:
    time.sleep(0.05)
sys.exit(3)
"""
FROM_PYTHON = """
import sys
from jobkit.launch.command import LaunchConfig, run
config = LaunchConfig(command=(sys.argv[1], "a b", "--lr=1", "wait"), nproc_per_node=2)
sys.exit(run(config))
"""
SAID = ["rank 0 of 2: ['a b', '--lr=1']\n", "rank 1 of 2: ['a b', '--lr=1']\n"]


def started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    (folder / "train.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JOBKIT_PYTHON": sys.executable}
    env["JOBKIT_LOGS"] = str(folder / "logs")
    return subprocess.Popen(
        [sys.executable, *words], env=env, stdout=subprocess.PIPE, text=True, cwd=folder,
        start_new_session=True,
    )  # fmt: skip


def test_from_python_ctrl_c_ends_the_ranks_and_tells_in_the_code(tmp_path: Path) -> None:
    with started(tmp_path, "-c", FROM_PYTHON, "train.py") as process:
        assert process.stdout
        said: list[str] = []
        while len(said) < 2:
            line = process.stdout.readline()
            assert line, said
            said += [line] * line.startswith("rank")
        assert sorted(said) == SAID
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does
        assert process.wait(300) == 130


def test_from_the_shell_the_code_is_the_runs(tmp_path: Path) -> None:
    own = ["-m", "jobkit", "launch", "train.py", "--nproc-per-node", "2", "--", "a b", "--lr=1"]
    with started(tmp_path, *own, "fail") as process:
        said = process.communicate(timeout=480)[0].splitlines(True)
    assert process.returncode == 3
    assert sorted(line for line in said if line.startswith("rank")) == SAID


def test_the_line_of_run_sh(monkeypatch, capsys) -> None:
    assert command.main([]) == 2
    error = capsys.readouterr().err
    assert "which program?" in error and error.count("\n") == 1
    monkeypatch.setenv("JOBKIT_PYTHON", "/opt/python")
    assert LaunchConfig(command=("t.py",)).line()[2:] == ["--", "/opt/python", "t.py"]
    size = ["--nproc-per-node", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr", "n0"]
    config = LaunchConfig(
        command=("python", "t.py"), nproc_per_node=4, nnodes=2, node_rank=1, master_addr="n0"
    )
    assert config.line()[2:] == [*size, "--", "python", "t.py"]
    with pytest.raises(UsageError, match="list of words"):
        LaunchConfig(command="train.py --lr 1").line()
