"""The minicluster's network: names, addresses, and links that are cut, slowed and healed."""

from __future__ import annotations

import os
import sys

import pytest

# Rank 0 takes what rank 1 sends; rank 1 prints how long it took, in seconds.
_SEND = """
import os, socket, sys, time
rank, there = int(os.environ["SLURM_PROCID"]), sys.argv[1]
if rank == 0:
    listener = socket.create_server(("", 30000)); c, _ = listener.accept()
    while c.recv(65536): pass
    c.sendall(b"x")
else:
    for _ in range(600):
        try: c = socket.create_connection((there, 30000), 2); break
        except ConnectionRefusedError: time.sleep(.1)
    start = time.monotonic()
    c.sendall(bytes(1_000_000)); c.shutdown(socket.SHUT_WR); c.recv(1)
    print(time.monotonic() - start)
"""


@pytest.fixture(scope="module")
def networked(make_cluster):
    if os.geteuid() != 0:
        pytest.skip("--netns needs root")
    return make_cluster("--netns", "--no-accounting", "--nodes=3")


_REACH = """
import socket, sys
try: socket.create_connection((sys.argv[1], 1), 1.5)
except ConnectionRefusedError: print("reached")
except OSError: print("lost")
"""


def _reaches(cluster, here: str, there: str) -> bool:
    """Does a task on one node reach the other node? Nobody listens, but its kernel answers."""
    argv = ["srun", "-w", here, "-n1", sys.executable, "-c", _REACH, there]
    answer = cluster.run(*argv).stdout.strip()
    assert answer in ("reached", "lost")
    return answer == "reached"


def test_each_node_has_a_name_and_an_address_of_its_own(networked) -> None:
    script = "echo $SLURMD_NODENAME $(hostname) $(getent hosts $(hostname))"
    lines = networked.run("srun", "-N3", "-n3", "sh", "-c", script).stdout.splitlines()
    words = [line.split() for line in sorted(lines)]
    assert [line[:2] for line in words] == [["n1", "n1"], ["n2", "n2"], ["n3", "n3"]]
    assert [line[2].rpartition(".")[2] for line in words] == ["1", "2", "3"]


def test_links_are_cut_and_healed(networked) -> None:
    assert _reaches(networked, "n1", "n2")
    assert networked.door("link", "cut", "n2").returncode == 0
    assert not _reaches(networked, "n1", "n2")
    assert networked.door("link", "heal").returncode == 0
    assert _reaches(networked, "n1", "n2")
    assert networked.door("link", "cut", "n1", "n2").returncode == 0
    assert not _reaches(networked, "n1", "n2")
    assert _reaches(networked, "n1", "n3")
    assert "n1 and n2 cut from each other" in networked.door("status").stdout
    assert networked.door("link", "heal", "n2").returncode == 0
    assert _reaches(networked, "n1", "n2")


def test_a_slow_link_is_slow(networked) -> None:
    def send_s() -> float:
        argv = ["srun", "-w", "n1,n2", "-n2", "--ntasks-per-node=1"]
        return float(networked.run(*argv, sys.executable, "-c", _SEND, "n1").stdout)

    least_s = 1.5  # 8 Mbit, less the bucket of 64 kB

    def is_fast() -> bool:  # once of a few times: the machine may be busy with something else
        return any(send_s() < least_s for _ in range(5))

    assert is_fast()
    assert networked.door("link", "slow", "n2", "4mbit").returncode == 0
    assert send_s() > least_s
    assert networked.door("link", "heal").returncode == 0
    assert is_fast()


@pytest.mark.parametrize(
    "words",
    [["cut"], ["cut", "n9"], ["cut", "n1", "n1"], ["slow", "n1"], ["slow", "n1", "fast"]],
    ids=" ".join,
)
def test_link_with_bad_words(networked, words: list[str]) -> None:
    done = networked.door("link", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "link:" not in networked.door("status").stdout
