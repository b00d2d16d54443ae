"""`python -m jobkit launch` and run() of Python: run.sh's line, its exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch import command
from jobkit.launch.command import LaunchConfig
from support.place import ROOT

PROGRAM = """
import os, sys, time
os.write(1, f"rank {os.environ['RANK']}: {sys.argv[1:-1]}\\n".encode())
while sys.argv[-1] == "wait":
    time.sleep(0.05)
sys.exit(3)
"""
FROM_PYTHON = """
import sys
from jobkit.launch.command import LaunchConfig, run
sys.exit(run(LaunchConfig(command=("train.py", "a b", "--lr=1", "wait"), nproc_per_node=2)))
"""
FROM_SHELL = ["-m", "jobkit", "launch", "train.py", "--nproc-per-node", "1"]


@pytest.mark.parametrize(
    ("words", "ranks", "code"),
    [
        (["-c", FROM_PYTHON], 2, 130),  # Ctrl-C ends the ranks, and the code tells
        ([*FROM_SHELL, "--", "a b", "--lr=1", "fail"], 1, 3),
    ],
)
def test_the_words_arrive_and_the_code_comes_back(tmp_path: Path, words, ranks, code) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JOBKIT_PYTHON": sys.executable}
    with subprocess.Popen(
        [sys.executable, *words], env=env | {"JOBKIT_LOGS": str(tmp_path / "logs")}, text=True,
        stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout
        lines = (line for line in process.stdout if line.startswith("rank"))
        said = {next(lines) for _ in range(ranks)}
        assert said == {f"rank {rank}: ['a b', '--lr=1']\n" for rank in range(ranks)}
        if code == 130:
            os.killpg(process.pid, signal.SIGINT)  # as the terminal does
        assert process.wait(300) == code


def test_the_line_of_run_sh(monkeypatch, capsys) -> None:
    assert command.main([]) == 2
    error = capsys.readouterr().err
    assert "which program?" in error and error.count("\n") == 1
    monkeypatch.setenv("JOBKIT_PYTHON", "/opt/python")
    assert LaunchConfig(command=("t.py",)).line()[2:] == ["--", "/opt/python", "t.py"]
    config = LaunchConfig(command=("python", "t.py"), nnodes=2, node_rank=1, master_addr="n0")
    size = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "n0"]
    assert config.line()[2:] == [*size, "--", "python", "t.py"]
    of_a_path = LaunchConfig(command=(Path("t.py"),), start_timeout=60.0)  # type: ignore[arg-type]
    words = ["--start-timeout", "60", "--", "/opt/python", "t.py"]
    assert of_a_path.line()[2:] == words
    with pytest.raises(UsageError, match="list of words"):
        LaunchConfig(command="train.py --lr 1").line()
