"""What the preflight reads of NCCL's log.

The lines are recorded ones, of the public issues named beside them, with hosts as there.
"""

import os
from pathlib import Path

import pytest
import torch

from jobkit.checks.preflight import group
from jobkit.checks.preflight.judge import judge_together
from support.allocation import TOLD, outcome, sound

# https://github.com/NVIDIA/nccl-tests/issues/252
IBEXT = """kolyoz1:27224:27909 [2] NCCL INFO Channel 02/0 : 2[2] -> 0[0] via P2P/CUMEM
kolyoz1:27225:27907 [3] NCCL INFO Channel 03/0 : 7[3] -> 3[3] [receive] via NET/IBext_v8/3/GDRDMA
kolyoz1:27225:27907 [3] NCCL INFO Channel 03/0 : 3[3] -> 7[3] [send] via NET/IBext_v8/3/GDRDMA
"""
# https://github.com/NVIDIA/nccl/issues/952
SOCKET = """<cluster_name>:919:1150 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read
<cluster_name>:926:1151 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
"""
# https://github.com/NVIDIA/nccl/issues/1189
NO_NVLS = """H20-GPU-06:4015540:4015653 [1] NCCL INFO 8 coll channels, 0 collnet channels, 0 nvls \
channels, 8 p2p channels, 2 p2p channels per peer
H20-GPU-06:4015539:4015652 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
"""
# https://github.com/aws/aws-ofi-nccl/issues/715
OFI = """algo-1:18063:20783 [6] NCCL INFO Channel 05/1 : 6[6] -> 10[2] [send] via NET/AWS \
Libfabric/1(2)/GDRDMA/Shared
algo-1:18060:20786 [3] NCCL INFO Channel 00/1 : 3[3] -> 7[7] via P2P/CUMEM/read
"""
# In the form of NCCL's source (src/transport/shm.cc), and of older versions.
SHARED = "x [0] NCCL INFO Channel 00 : 0[1a000] -> 1[1b000] via SHM/direct/direct\n"


def test_the_links_of_recorded_lines() -> None:
    for text, links in (
        (IBEXT, [(0, 2, "P2P/CUMEM"), (3, 7, "NET/IBext_v8 GDRDMA")]),
        (SOCKET, [(8, 15, "P2P/IPC"), (6, 15, "NET/Socket")]),
        (OFI, [(6, 10, "NET/AWS Libfabric GDRDMA"), (3, 7, "P2P/CUMEM")]),
        (NO_NVLS, [(0, 2, "NET/IB GDRDMA")]),
        (SHARED, [(0, 1, "SHM")]),
        ("user:5181:5232 [2] NCCL INFO Using network IB\n", []),
    ):
        assert group.links(text) == links


def test_the_log_is_a_file_of_this_process_and_a_users_own_is_left(tmp_path: Path) -> None:
    environ = {"NCCL_DEBUG_SUBSYS": "GRAPH"}
    path = group.keep_log(environ)
    assert environ["NCCL_DEBUG"] == "INFO" and "NCCL_DEBUG_SUBSYS" not in environ
    host = os.uname().nodename.split(".")[0]
    assert path.name == f"nccl-{host}-{os.getpid()}.log" and path.parent.is_dir()
    assert group.read_log(path) == ""
    path.write_text(OFI)
    assert group.read_log(path) == OFI
    given = {"NCCL_DEBUG_FILE": str(tmp_path / "mine.%p"), "NCCL_DEBUG": "WARN"}
    assert group.keep_log(given) == tmp_path / f"mine.{os.getpid()}"
    assert given["NCCL_DEBUG"] == "WARN"


def told(check: str, facts: list[dict], results: list[dict]) -> tuple[str, str]:
    (it,) = [x for x in judge_together(facts, results, TOLD) if x.check == check]
    assert not it.faults
    return it.text, "\n".join(it.notes)


def via(first: int, second: int, way: str) -> str:
    return f"n:1:2 [0] NCCL INFO Channel 00/0 : {first}[0] -> {second}[1] via {way}\n"


FAST = via(0, 1, "P2P/CUMEM/read") + via(1, 2, "NET/IB/0/GDRDMA")
WAYS = [
    (FAST, "NET/IB GDRDMA between 1 pair of ranks (1-2); P2P/CUMEM between 1 pair", ""),
    (via(1, 2, "NET/Socket/3"), "", "TCP: NET/Socket between 1 pair of ranks (1-2): "),
    (via(0, 1, "SHM/direct/direct"), "", "SHM between 1 pair of ranks (0-1) of a node"),
    (via(0, 1, "NET/IB/0/GDRDMA"), "", "NET/IB GDRDMA between 1 pair of ranks (0-1) of a node"),
    (via(1, 2, "NET/IB/0"), "", "NET/IB between 1 pair of ranks (1-2) is without GPUDirect"),
    ("", "", "no line of a connection"),
]


def test_ways_are_told_and_slow_ones_noted() -> None:
    facts = sound()
    for log, said, note in WAYS:
        links = group.links(log)
        results = [one | {"links": [] if one["rank"] else links} for one in outcome(facts)]
        text, notes = told("transports", facts, results)
        assert said in text and note in notes and bool(notes) == bool(note)
        assert told("transports", facts, [r | {"backend": "gloo"} for r in results]) == ("", "")


def test_a_low_bandwidth_between_nodes_is_noted() -> None:
    for nodes, backend, mb_per_s, note in (
        (2, "nccl", 4000.0, "4000 MB/s is slow for nccl on this network, of which 5000 are"),
        (2, "nccl", 6000.0, ""),
        (2, "gloo", 2000.0, ""),
        (2, "gloo", 60.0, "60 MB/s is slow"),
        (1, "nccl", 3.0, ""),  # inside of a node
    ):
        facts, more = sound(nodes), {"backend": backend, "bus_mb_per_s": mb_per_s}
        text, notes = told("bandwidth", facts, [one | more for one in outcome(facts)])
        assert note in notes and bool(notes) == bool(note)
        assert f"2 {'nodes' if nodes > 1 else 'ranks of a node'}" in text


def test_sums_that_are_wrong_now_and_then_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL adds wrongly in some calls only: here in one of seven, in one element."""
    calls = []

    def add(tensor, group) -> None:  # as two ranks would, of which this one is the first
        calls.append(tensor.numel())
        tensor += tensor + 1
        tensor[-1] += len(calls) % 7 == 6 and tensor.numel() > 1 << 16

    monkeypatch.setattr(group.dist, "get_world_size", lambda inner: 2)
    monkeypatch.setattr(group.dist, "all_reduce", add)
    said = group.wrong_sums(torch.device("cpu"), 0, None)
    assert said == "2 of 20 sums of 1024 KiB between the nodes are wrong" and len(calls) == 40
