"""LaunchConfig and run() of Python: run.sh's line, its exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.errors import UsageError
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
command = ("train.py", "a b", "--lr=1", sys.argv[1])
sys.exit(run(LaunchConfig(command=command, nproc_per_node=2)))
"""


@pytest.mark.parametrize(("word", "code"), [("wait", 130), ("fail", 3)])
def test_the_words_arrive_and_the_code_comes_back(tmp_path: Path, word, code) -> None:
    """130: Ctrl-C ends the ranks, and the code tells."""
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JOBKIT_PYTHON": sys.executable}
    with subprocess.Popen(
        [sys.executable, "-c", FROM_PYTHON, word], env=env | {"JOBKIT_LOGS": str(tmp_path)},
        text=True, stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout
        lines = (line for line in process.stdout if line.startswith("rank"))
        if word == "wait":
            said = {next(lines) for _ in range(2)}
            assert said == {f"rank {rank}: ['a b', '--lr=1']\n" for rank in range(2)}
            os.killpg(process.pid, signal.SIGINT)  # as the terminal does
        assert process.wait(300) == code


def test_the_line_of_run_sh(monkeypatch) -> None:
    monkeypatch.setenv("JOBKIT_PYTHON", "/opt/python")
    of_a_path = LaunchConfig(command=(Path("t.py"),))  # type: ignore[arg-type]
    assert of_a_path.line()[2:] == ["--", "/opt/python", "t.py"]
    config = LaunchConfig(command=("python", "t.py"), nnodes=2, node_rank=1, master_addr="n0")
    size = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "n0"]
    assert config.line()[2:] == [*size, "--", "python", "t.py"]
    with pytest.raises(UsageError, match="list of words"):
        LaunchConfig(command="train.py --lr 1").line()
