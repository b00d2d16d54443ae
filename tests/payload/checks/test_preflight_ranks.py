"""The preflight without Slurm: how processes meet, and where they could wait forever.

What a fault is called is judged from facts in tests/unit/checks/test_preflight_judge.py.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from jobkit.checks.preflight import cli, group, rendezvous
from jobkit.checks.preflight import facts as preflight_facts
from jobkit.checks.preflight import rank as preflight_rank
from jobkit.checks.preflight.rendezvous import (
    Connection,
    Rendezvous,
    Unreachable,
    connect,
    connect_or_listen,
    listen,
)
from jobkit.payload.place import RankEnv
from ranks import on_ranks
from support.forks import free_port
from support.place import ROOT
from support.rigs import environment

NAME = {"rank": 3, "host": "n2"}


@pytest.fixture(autouse=True)
def _data(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JOBKIT_DATA_DIR", str(tmp_path / "data"))


def summed(real: Callable[..., str], *words: Any) -> str:
    print("sums compared")
    return real(*words)


def be_rank(rank: int, port: int, out: str) -> int:
    os.environ.update(OMP_NUM_THREADS="1", MASTER_PORT=str(port))
    group.wrong_sums = partial(summed, group.wrong_sums)  # of this process
    with Path(f"{out}-{rank}").open("w") as sys.stdout:
        return cli.main(["--dataset", "synthetic", "--timeout", "300"])


def test_two_ranks_add_up_and_measure_their_bandwidth(tmp_path: Path, fork_server) -> None:
    codes = on_ranks(be_rank, free_port(), str(tmp_path / "rank"), join=False, limit_s=600)
    said = "".join((tmp_path / f"rank-{rank}").read_text() for rank in range(2))
    assert codes == [0, 0], said
    assert said.count("all checks passed") == 1
    assert said.count("sums compared") == 2
    assert "right over 2 ranks" in said and "2 ranks of a node" in said
    assert not [*(tmp_path / "logs").glob(".preflight*")]


def test_a_signal_has_the_coordinator_report_at_once(monkeypatch, capsys) -> None:
    """srun ends the others when one rank fails: what is known must be said all the same."""
    # A name whose second look-up would be an error: it may take seconds.
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x" * 64}
    monkeypatch.setattr(preflight_rank, "addresses_of", lambda name: ["127.0.0.1"])
    for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

    def stopped(*words) -> dict:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return preflight_facts.find_facts(*words)

    monkeypatch.setattr(preflight_rank, "find_facts", stopped)
    assert cli.main(["--dataset", "synthetic", "--timeout", "3000"]) == 5
    assert "presence: rank 1" in capsys.readouterr().out
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_torch_that_cannot_be_imported_is_one_line(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    env = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    words = [sys.executable, "-m", "jobkit.checks.preflight.cli", "--dataset", "synthetic"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 5 and not done.stderr, done.stderr
    assert done.stdout.startswith("[preflight] FAULT versions: rank 0 on ")
    assert "libcudart.so.12" in done.stdout and done.stdout.count("\n") == 1


def test_bad_words_end_with_2_a_place_that_contradicts_itself_with_5(capsys, monkeypatch) -> None:
    assert cli.main(["--dataset", "cifar11"]) == 2
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 2 and "bash run.sh --preflight --dry-run" in said
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "2"}
    step |= {"SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["--dataset", "synthetic"]) == 5
    said = capsys.readouterr().out
    assert said.startswith("[preflight] FAULT ranks: rank 2 on ") and said.count("\n") == 1
    assert "SLURM_NTASKS is 3 and the step has" in said


# --- a rendezvous in this process ------------------------------------------------------------


class Served(Rendezvous):
    def __init__(self, token: str = "t") -> None:
        listener = listen(0)
        self.port = listener.getsockname()[1]
        super().__init__(listener, token)

    def join(self, token: str = "t", **name) -> Connection:
        return connect(["127.0.0.1"], self.port, token, {**NAME, **name})


def test_a_stage_ends_when_all_who_are_left_have_answered() -> None:
    """One that ends in the middle is not waited for; nor is anybody once a signal came."""
    served = Served()
    *ranks, _hangs = [served.join() for _ in range(4)]
    for number, rank in enumerate(ranks):
        rank.send({"stage": "facts", "number": number})
    assert len(served.gather("facts", 3, 300)) == 3
    ranks[0].send({"stage": "results", "number": 0})
    ranks[1].close()
    threading.Timer(0.3, ranks[2].send, [{"stage": "results", "number": 2}]).start()
    before = time.monotonic()
    assert {m["number"] for m in served.gather("results", 3, 250)} == {0, 2}
    assert len(served.gather("facts", 4, 0.1)) == 3  # one that connected and then hangs
    served.hurried = True
    assert len(served.gather("facts", 4, 250)) == 3 and len(served.connected) == 4
    assert time.monotonic() - before < 200


def meet(port: int, listens: bool, timeout_s: float) -> Connection | socket.socket:
    join = lambda port: connect(["127.0.0.1"], port, "t", NAME)  # noqa: E731
    return connect_or_listen(join, port, listens, timeout_s)


def test_rank_0_listens_where_nobody_does_and_others_never() -> None:
    meet(free_port(), listens=True, timeout_s=300).close()
    with pytest.raises(Unreachable, match="Connection refused"):
        meet(free_port(), listens=False, timeout_s=0.5)
    assert isinstance(meet(Served().port, listens=True, timeout_s=300), Connection)


@pytest.mark.parametrize("says", [b"SSH-2.0-other\r\n", b""])
def test_another_program_is_not_taken_for_the_jobs(says, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_HELLO_S", 0.5)
    kept = []  # what is closed would not be silent
    with socket.create_server(("", 0)) as other:

        def answer() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                while True:
                    kept.append(other.accept()[0])
                    kept[-1].sendall(says)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Unreachable, match="another program or another job listens there"):
            meet(other.getsockname()[1], listens=True, timeout_s=0.1)


MESSAGES = b'\n{"rank": 0, "host": "n1"}\n{"stage": "facts", "number": 2}\n'
STRANGERS = {
    "silent": b"",
    "no text": b"\xff\n",
    "long": b"x" * (1 << 20),
    "the token": b"t" + MESSAGES,
    "a proof of another port": rendezvous._proof("t", 1, "rank").encode() + MESSAGES,
}


@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_stops_nothing_and_is_told_nothing(sent: bytes, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_HELLO_S", 1.0)
    served = Served()
    with pytest.raises(Unreachable, match="another job"):
        served.join("another token")
    with socket.create_connection(("127.0.0.1", served.port)) as stranger:
        stranger.settimeout(100)
        with contextlib.suppress(ConnectionError):  # closed while it sends
            stranger.sendall(sent)
        served.join().send({"stage": "facts", "number": 1})
        assert [m["number"] for m in served.gather("facts", 1, 100)] == [1]
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(100) == b"", "it was answered"
    assert len(served.connected) == 1


# --- what a process finds out ----------------------------------------------------------------


def test_a_launcher_inside_a_step_has_ranks_of_its_own() -> None:
    """torchrun as the one task of a node: the step's tasks are not its ranks."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2"}
    place = RankEnv(rank=5, local_rank=1, world_size=8, local_world_size=4, master_addr="n1")
    found = preflight_facts.who(place, step)
    assert (found["tasks"], found["nodes"], found["host"]) == (2, ["n1", "n2"], "n2")
    assert preflight_facts.who(place, {**step, "TORCHELASTIC_RUN_ID": "x"})["tasks"] is None


def test_gpus_that_slurm_granted_and_torch_does_not_see_are_a_fault(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    place = RankEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, master_addr="n1")
    for wanted, granted, fault in (("auto", "2", "Slurm granted 2"), ("auto", "0", ""),
                                   ("cpu", "2", ""), ("cuda", "", "--device cuda")):  # fmt: skip
        found = preflight_facts.gpu(place, wanted, {"SLURM_GPUS_ON_NODE": granted})["gpu_fault"]
        assert found.startswith(fault) and bool(found) == bool(fault)


def test_folders_are_tried_and_not_only_listed(tmp_path) -> None:
    assert preflight_facts.write_fault(tmp_path / "new") == ""
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert preflight_facts.write_fault(tmp_path / "file") == "File exists"
    found = preflight_facts.data("synthetic", tmp_path / "file", (8, 8))
    assert found["cache"] is None and found["data_fault"].endswith("cannot be written: File exists")
