"""The checks of a preflight: facts with an injected fault in, that fault and no other out."""

import pytest

from jobkit.checks.preflight import judge
from jobkit.checks.preflight.judge import judge_facts, judge_together
from support.allocation import TOLD, outcome, sound


def lines(facts: list[dict], results=None, expected: int | None = None, **more) -> list[str]:
    given = {"waited_s": 30.0, "port_fault": "", **more}
    checks = judge_facts(facts, expected or len(facts), **given)
    checks += judge_together(facts, outcome(facts) if results is None else results, TOLD)
    return [line for check in checks for line in check.lines()]


def faults(*words, **more) -> list[str]:
    told = lines(*words, **more)
    return [line.removeprefix("FAULT ") for line in told if line.startswith("FAULT ")]


def test_a_sound_allocation_has_no_fault_and_a_line_for_each_check() -> None:
    told = lines(sound())
    assert told[0] == (
        "ok environment: driver 550.54; torch 2.12 for CUDA 12.6; built for sm_80 sm_90"
    )
    assert len(told) == 14 and all(line.startswith("ok ") for line in told), told
    assert "ok ranks: world size 4, each rank once; ranks 0-1 on n1, ranks 2-3 on n2" in told
    assert any("busbw 20 GB/s between 2 nodes (all_reduce of 256 MiB)" in x for x in told)


def change(**new):
    """A fault that changes the facts of some ranks."""
    ranks = new.pop("ranks", [3])

    def inject(facts: list[dict]) -> None:
        for rank in ranks:
            facts[rank].update(new)

    return inject


ALL = [0, 1, 2, 3]
OLD = {"python": "3.9.2", "torch": "2.12", "jobkit": "0.1"}
NEW = {**sound()[0]["versions"], "torch": "2.9", "nccl": "2.27"}
INJECTED = [
    (change(ranks=ALL, rank=0), "ranks", "4 processes believe that they are rank 0"),
    (change(ranks=[3], rank=2), "ranks", "rank 2 on n2: 2 processes"),
    (lambda f: (f[1].update(host="n2"), f[2].update(host="n1")), "ranks", "not node * 2 + local"),
    (change(local_rank=0), "ranks", "rank 3 on n2: rank is not node * 2"),
    (change(ranks=ALL, world_size=8), "ranks", "world size is 8, and 4 were started"),
    (lambda f: [x.update(tasks=None, world_size=2 + 2 * (x["rank"] < 3)) for x in f], "ranks",
     "rank 3 on n2: world size is 2, and 4 on rank 0"),
    (change(ranks=[2, 3], gpu="GPU-9"), "gpus", "ranks 2-3 on n2: 2 ranks are on one GPU, GPU-9"),
    (change(gpus=0), "gpus", "rank 3 on n2: no GPU is visible, and other ranks have one"),
    (change(gpus=0, gpu_fault="the driver is too old"), "gpus", "too old; fix: install a torch"),
    (change(gpus=0, gpu_fault="Slurm granted 1 here, and torch sees no GPU"), "gpus",
     "fix: start a container with GPUs"),
    # Two MIG instances of a GPU.
    (change(ranks=[2, 3], gpu_bus="0000:01:00.0"), "gpus", "2 ranks are on one GPU, 0000:01"),
    (change(capability="sm_70"), "environment", "the GPU is sm_70, and torch was built for"),
    (change(ranks=[0, 1], cores=[0], threads=1), "cores", "overlap (rank 0: 0, rank 1: 0 of 64)"),
    (change(ranks=[1], cores=[1, 2]), "cores", "overlap (rank 0: 0-3, rank 1: 1-2 of 64)"),
    (change(threads=8), "cores", "rank 3 on n2: 8 threads on 4 cores"),
    (change(ranks=[2, 3], master_ips=["127.0.1.1"]), "master",
     "ranks 2-3 on n2: the master's name n1 resolves to 127.0.1.1 between nodes"),
    (change(own_ips=["127.0.1.1", "::1"]), "master", "its own name n2 resolves to 127.0.1.1"),
    (change(own_ips=[]), "master", "its own name n2 does not resolve"),
    (change(versions=OLD), "versions", "rank 3 on n2: python is 3.9.2, and 3.11.2 on the other"),
    (change(ranks=[0], versions=NEW), "versions", "rank 0 on n1: torch is 2.9, and 2.12 on the"),
    (change(ranks=[2, 3], log_fault="Read-only file system"), "logs",
     "ranks 2-3 on n2: /logs cannot be written: Read-only file system"),
    (change(ranks=[0], data_fault="/x: no such directory"), "data", "/x: no such"),
]  # fmt: skip
RESULTS = [
    (change(hidden=True), "shared", "rank 3 on n2: /logs is another folder"),
    (change(sum=9.0), "all_reduce", "rank 3 on n2: the sum is 9.0, and 10.0 is right"),
    (change(wrong_sums="2 of 20 sums of 1024 KiB between the nodes are wrong"), "all_reduce",
     "rank 3 on n2: 2 of 20 sums of 1024 KiB between the nodes are wrong; fix: do not train"),
    (change(ranks=ALL, group_fault="timed out"), "all_reduce", "timed out"),
    (change(ranks=ALL, bus_mb_per_s=3.0), "bandwidth", "busbw 0.003 GB/s"),
]  # fmt: skip


@pytest.mark.parametrize("case", [*INJECTED, *RESULTS], ids=lambda case: case[2])
def test_an_injected_fault_is_found_and_no_other(case) -> None:
    inject, check, text = case
    facts, results = sound(), outcome(sound())
    inject(results if case in RESULTS else facts)
    found = faults(facts, results if case in RESULTS else None)
    assert {fault.split(":")[0] for fault in found} == {check}, found
    assert any(text in fault for fault in found), found
    assert all(len(fault.partition("; fix: ")[2]) > 20 for fault in found)


STUCK = [{"rank": r, "host": "n2"} for r in (2, 3)]
ABSENT = [
    ((sound()[:2], outcome(sound()[:2]), 4), {}, "presence: ranks 2-3 on n2: did not connect with"),
    ((sound(), outcome(sound())[:3]), {}, "all_reduce: rank 3 on n2: ended or hung during the all"),
    ((sound()[:2], outcome(sound()[:2]), 4), {"connected": STUCK},
     "presence: ranks 2-3 on n2: connected but did not report"),
    ((sound(),), {"port_fault": "in use"}, "port: rank 0 on n1: port 12345 cannot be used: in"),
]  # fmt: skip


def test_what_is_absent_or_taken_is_named_with_its_node() -> None:
    for words, more, text in ABSENT:
        (found,) = faults(*words, **more)
        assert found.startswith(text)


def test_nodes_simulated_on_one_machine_may_meet_at_its_loopback() -> None:
    near = {"machine": "m", "master_ips": ["127.0.0.1"], "own_ips": ["127.0.1.1"]}
    facts = [f | near | {"cores": [0, 1], "machine_cores": 2} for f in sound()]
    assert not faults(facts)
    # Only one node's ranks came, to that loopback: the others have met at their own.
    assert "resolves to 127.0.0.1 between nodes" in judge.master(facts[:2]).lines()[0]
    # Gloo with an interface does not need the node's name.
    assert not faults([f | {"own_ips": ["127.0.1.1"], "interface": "ib0"} for f in sound()])


EIGHT = {"cores": list(range(8)), "threads": 8}
FEW = {"cores": [0, 1, 2], "threads": 1}


def test_what_is_only_worth_knowing_is_a_note() -> None:
    for fact, text in (
        (EIGHT, "cores: n1 has 8 for 16 threads of 2 ranks: cores oversubscribed"),
        (FEW, "n1 has 3 cores for 2 GPUs, which then wait for the"),
        ({"gpu_name": "X200"}, ""),
    ):
        facts = [f | fact for f in sound()]
        notes = [line for line in lines(facts) if not line.startswith("ok ")]
        assert bool(notes) == bool(text) and all(text in n for n in notes if "n2" not in n), text
    facts[3]["gpu_name"] = "Y9"
    assert "note gpus: mixed GPU models: the slowest limits all" in lines(facts)


def test_cores_are_said_of_all_nodes_and_that_they_are_shared() -> None:
    facts = sound()
    assert judge.cores(facts).text == "4 of 64 cores for each rank"
    for fact, count in zip(facts, (8, 8, 16, 16), strict=True):
        fact |= {"cores": list(range(count)), "machine_cores": count}
    said = "8 to 16 of 8 to 16 cores for each rank, shared with others of its node"
    assert judge.cores(facts).text == said


def test_a_fault_of_many_ranks_is_short() -> None:
    (fault, *_) = faults([f | {"rank": 0} for f in sound(100, 4)])
    assert len(fault) < 700 and " and 92 more nodes" in fault
