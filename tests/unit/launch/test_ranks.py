"""The starter of the ranks on this machine: codes, signals, and what is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from jobkit.outcome.evidence import find_sign
from jobkit.outcome.logs import Tail
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


def test_a_rank_killed_by_a_signal_is_named() -> None:
    """In words that the collector takes for evidence; of the others, which it ends, none."""
    text = "[[ $RANK == 3 ]] && kill -SEGV $$; exec sleep 600"
    words = [*STARTER, "--ranks", "2", "--node-rank", "1", "--nnodes", "2", "--", "bash", "-c"]
    done = subprocess.run([*words, text], env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + signal.SIGSEGV
    assert done.stderr == "jobkit: error: rank 3: Signal 11 (SIGSEGV) received\n"
    sign = find_sign(Tail("log", [(1, done.stderr.strip())]))
    assert sign and sign.status == "failed" and sign.reason.startswith("killed: ")


def test_the_port_of_the_ranks_is_given_to_no_other_program() -> None:
    """The first rank binds it, as torch does, while others cannot."""
    text = (
        "import os, socket\n"
        "def bound(reuse):\n"
        "    with socket.socket() as one:\n"
        "        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)\n"
        "        try:\n"
        "            one.bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "            return not one.listen()\n"
        "        except OSError:\n"
        "            return False\n"
        "print(bound(0), bound(1))\n"
    )
    words = [*STARTER, "--ranks", "1", "--", sys.executable, "-c", text]
    done = subprocess.run(words, env=ENV, stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.stdout == "False True\n"


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
