"""The starter of a command's ranks on this machine: codes, signals, and what is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.place import ROOT

STARTER = [sys.executable, "-m", "jobkit.launch.local.ranks", "--poll", "0.01"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def start(ranks: int, text: str) -> "subprocess.Popen[str]":
    words = [*STARTER, "--ranks", str(ranks), "--", "bash", "-c", text]
    return subprocess.Popen(words, env=ENV, stdout=subprocess.PIPE, text=True)


def test_each_rank_gets_the_variables_of_torchrun() -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR"
    shown = " ".join(f"${name}" for name in names.split())
    with start(3, f'echo "{shown} $MASTER_PORT"') as process:
        lines = sorted(process.communicate(timeout=100)[0].splitlines())
    assert process.returncode == 0
    assert [line.rsplit(" ", 1)[0] for line in lines] == [
        f"{r} {r} 3 3 0 127.0.0.1" for r in range(3)
    ]
    assert len({line.split()[-1] for line in lines}) == 1


def test_the_first_failure_ends_the_others_and_is_the_code() -> None:
    with start(3, "[[ $RANK == 1 ]] && exit 7; exec sleep 600") as process:
        assert process.wait(200) == 7


def test_a_rank_that_ends_well_leaves_the_others_their_time(tmp_path: Path) -> None:
    with start(2, f"[[ $RANK == 0 ]] || (sleep 0.5; touch {tmp_path}/done)") as process:
        assert process.wait(200) == 0
    assert (tmp_path / "done").exists()


def test_a_rank_killed_by_a_signal_counts_as_in_a_shell() -> None:
    with start(1, "kill -KILL $$") as process:
        assert process.wait(200) == 128 + signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_reaches_every_rank(signum: signal.Signals) -> None:
    text = f"trap 'exit 75' {signum}; echo ready; while :; do sleep 0.02; done"
    with start(2, text) as process:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signum)
        assert process.wait(200) == 75


def test_the_end_on_request_leaves_nothing(tmp_path: Path) -> None:
    """Also what a rank started and forgot."""
    text = f"sleep 300 & echo $! > {tmp_path}/$RANK; echo ready; wait"
    with start(2, text) as process:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.terminate()
        assert process.wait(200) == 143
    for rank in (0, 1):
        pid = int((tmp_path / str(rank)).read_text())
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


def test_lines_of_ranks_that_write_together_stay_whole() -> None:
    """Each line is written in two parts, as an unbuffered Python does."""
    text = "for i in {1..300}; do printf 'rank %s' $RANK; printf ' line %s\\n' $i; done; printf end"
    with start(2, text) as process:
        lines = process.communicate(timeout=300)[0].splitlines()
    whole = [f"rank {rank} line {n}" for rank in (0, 1) for n in range(1, 301)]
    assert sorted(line for line in lines if line.startswith("rank")) == sorted(whole)
