"""From profiled steps to a cause and to who is late, from made-up ranks."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from jobkit.analysis.collect.why import breakdown
from jobkit.program.why import measured
from support.fake_study import profiled

MS = 1e-3


def records(found: list[dict[str, Any]], attempt: int = 0) -> list[dict[str, Any]]:
    return [{"attempt": attempt, "rank": rank, **fields} for rank, fields in enumerate(found)]


def steps(ranks: int, busy: Any, communication: float = 4 * MS, count: int = 15) -> list[Any]:
    """Records of steps of which busy(step, rank) is what a rank is busy for, in host's seconds."""
    single = [
        profiled([10 * MS] * ranks, (), [busy(j, i) for i in range(ranks)], communication, 1)
        for j in range(count)
    ]
    return [one | {"step": 20 + j} for j, found in enumerate(single) for one in records(found)]


CHANCE = random.Random(0)
JITTER = [[2 * MS * CHANCE.random() for _ in range(16)] for _ in range(64)]


@pytest.mark.parametrize(
    ("ranks", "busy", "says"),
    [
        (1, lambda j, i: 3 * MS, {"communication_s": 4, "host_s": 3}),
        (4, lambda j, i: 3 * MS, {"communication_s": 4, "waiting_s": 0, "random_imbalance_s": 0}),
        # A rank of four that is 40 ms late in each step: three wait for it.
        (4, lambda j, i: 40 * MS * (i == 2),
         {"communication_s": 34, "waiting_s": 30, "late_rank": 2, "late_s": 40, "useful_max_s": 50,
          "late_host": "node0", "late_cause": "host", "random_imbalance_s": 0}),
        # In turn: nobody is named, and all of it is lost.
        (4, lambda j, i: 40 * MS * (i == j % 4), {"waiting_s": 30, "random_imbalance_s": 30}),
        # Ranks 4 to 7 are a node, in turn late by 40 and by 20 ms.
        (8, lambda j, i: (i >= 4) * (20 + 20 * (i == 4 + j % 4)) * MS,
         {"late_host": "node1", "late_rank": None, "late_cause": "host"}),
        # The ranks of node1 are late by 80 ms, and a rank of the other node by more.
        (8, lambda j, i: (100 * (i == 0) + 80 * (i >= 4)) * MS,
         {"late_rank": 0, "late_host": "node0", "late_cause": "host"}),
        # Once in 15 steps: not lasting, and not typical either.
        (4, lambda j, i: 400 * MS * (i == 1 and j == 7), {"waiting_s": 0}),
        # A burst of six steps, as by another process on its core.
        (2, lambda j, i: 6 * MS * (i == 1 and j < 6), {}),
        # Now one and now the other, and one of them a little more often.
        (2, lambda j, i: 40 * MS * (i == (j % 5 < 3)), {}),
        # Jitter of 2 ms is in turn.
        (16, lambda j, i: JITTER[j][i], {}),
    ],
)  # fmt: skip
def test_who_is_late_and_by_what(ranks: int, busy: Any, says: dict[str, Any]) -> None:
    found = breakdown(steps(ranks, busy))
    for name, value in says.items():
        times = name.endswith("_s")
        assert found[name] == (pytest.approx(value * MS, abs=0.1 * MS) if times else value), name
    if "late_host" not in says:
        assert "late_rank" not in found
    four = ("compute_s", "communication_s", "data_wait_s", "host_s", "last_rank_wait_s")
    assert sum(found[name] for name in four) == pytest.approx(found["iteration_s"])
    ordered = [found[name] for name in ("useful_max_s", "busy_max_s", "iteration_s")]
    assert ordered == sorted(ordered)


def test_a_rank_that_waits_for_data_is_late_by_that() -> None:
    found = breakdown(records(profiled([10 * MS] * 2, [0, 30 * MS], (), 2 * MS)))
    assert (found["late_rank"], found["late_cause"]) == (1, "data wait")
    assert found["late_s"] == pytest.approx(30 * MS, abs=0.1 * MS)
    assert found["busy_max_s"] == pytest.approx(40 * MS, abs=0.1 * MS)
    of_ranks = json.loads(found["by_rank"])
    assert {rank: data_s for rank, (*_, data_s, _) in of_ranks.items()} == {"0": 0, "1": 0.03}


def window(mean_s: float, typical_s: float, data_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    times = {"wall_s": 50 * mean_s, "step_p50_s": typical_s, "data_wait_s": 50 * data_s}
    return {"steps": 50, **times, **fields}


def test_rare_slow_steps_count_as_often_as_they_occur() -> None:
    """8 ranks, each slow by 100 ms in 2 % of the steps, of which the profiled ones had none."""
    same = steps(8, lambda j, i: 0.0, count=5)
    windows = [window(29 * MS, 14 * MS)] * 20 + [window(9.0, 9.0, warmup=True)]
    windows += [window(9.0, 9.0, steps=steps) for steps in (None, "x", -1)]
    found = breakdown(same, windows)
    assert found["slow_steps_s"] == pytest.approx(15 * MS)
    assert found["random_imbalance_s"] == pytest.approx(15 * MS)
    assert found["iteration_s"] == pytest.approx(29 * MS, abs=0.1 * MS)
    # The median of a window of one step, which is slow, is no typical step.
    one = breakdown(same, [window(14 * MS, 14 * MS), window(9, 64 * MS, steps=1, wall_s=64 * MS)])
    assert one["slow_steps_s"] == pytest.approx(50 * MS / 51)
    two = breakdown(same, [window(9, p, steps=1, wall_s=20 * MS) for p in (10 * MS, 20 * MS)])
    assert two["slow_steps_s"] == pytest.approx(5 * MS)
    # One rank, and copies, which never wait for each other.
    for of_ranks in (records(profiled([10 * MS])), steps(2, lambda j, i: 0.0, 0.0, count=5)):
        alone = breakdown(of_ranks, windows)
        assert alone["host_s"] == pytest.approx(alone["slow_steps_s"]) and alone["host_s"] > 0.01
        assert alone["communication_s"] == alone["waiting_s"] == 0
        assert alone["compute_s"] + alone["host_s"] <= alone["useful_max_s"] <= alone["iteration_s"]


def test_waits_for_data_between_the_profiled_steps_are_data() -> None:
    found = breakdown(steps(2, lambda j, i: 0.0, count=5), [window(24 * MS, 14 * MS, 10 * MS)])
    assert found["data_wait_s"] == pytest.approx(10 * MS)
    assert found["slow_steps_s"] == pytest.approx(0)


def test_a_gpu_hides_waits_of_the_host_and_is_not_slowed_by_the_profiler() -> None:
    one = {"step": 20, "steps": 5, "host": "a", "gpu": True, "collectives": [], "exposed": []}
    names = ("iteration_s", "compute_s", "host_s", "data_wait_s")
    for parts, own, expected in (
        ([100, 99, 0.0, 0.0, 1], window(0.1, 0.1, 0.05), (100, 99, 1, 0)),
        ([1.6, 0.4, 0.0, 0.0, 1.2], window(1 * MS, 1 * MS), (1, 0.4, 0.6, 0)),
    ):
        found = breakdown(records([one | {"parts": [[x * MS for x in parts]]}]), [own])
        assert [found[name] / MS for name in names] == pytest.approx(expected)


def test_places_that_a_rank_has_not_are_left_out_and_the_newest_attempt_counts() -> None:
    first = records(profiled([10 * MS, 10 * MS], (), [0, 50 * MS]))
    alone = [{**records(profiled([99.0]))[0], "step": 60}]
    empty = [record | {"parts": [], "step": 80} for record in first]
    assert breakdown([*first, *alone, *empty])["ranks"] == 2
    second = records(profiled([10 * MS, 10 * MS]), attempt=1)
    assert "late_rank" not in breakdown([*first, *second])
    assert breakdown([]) == {"not_profiled": None}
    assert breakdown([{"reason": "no torch"}]) == {"not_profiled": "no torch"}


def test_a_gpu_s_steps_are_those_of_its_collectives() -> None:
    """Five steps of 10 ms; rank 1 comes 4 ms late to the second of two collectives of each."""
    found = []
    for rank in range(2):
        spans = []
        for j in range(5):
            zero, late = 10_000 * j, 4_000 * rank
            spans += [[0, "ncclA", zero, 1_000], [0, "ncclA", zero + 4_000 + late, 5_000 - late]]
        parts = [0.010, 0.004 + 0.004 * rank, 0.006 - 0.004 * rank, 0.0, 0.0]
        exposed = [[b, b + n] for _, _, b, n in spans]
        found.append(
            {"step": 20, "steps": 5, "host": "a", "device": f"cuda:{rank}", "gpu": True}
            | {"parts": [parts], "collectives": spans, "exposed": exposed}
        )
    row = breakdown(records(found))
    assert (row["late_rank"], row["late_device"], row["late_cause"]) == (1, "cuda:1", "compute")
    assert row["late_s"] == pytest.approx(4 * MS) and row["waiting_s"] == pytest.approx(2 * MS)
    for one in found:  # the profiler slows the hosts by 8 ms
        one["parts"] = [[x + 8 * MS * (i in (0, 4)) for i, x in enumerate(one["parts"][0])]]
    row = breakdown(records(found), [window(10 * MS, 10 * MS)])
    assert row["useful_max_s"] == pytest.approx(8 * MS)


class Event:
    """One of the profiler's."""

    def __init__(self, name: str, begin: int, length: int = 0, kind: str = "cpu") -> None:
        self.name, self.start_ns = lambda: name, lambda: 1000 * begin
        self.duration_ns = lambda: 1000 * length
        self.is_user_annotation = lambda: kind == "annotation"
        self.device_type = lambda: SimpleNamespace(name="CPU" if kind == "cpu" else "CUDA")


MARKS = [Event("jobkit: step", at) for at in (0, 100, 200)]


def test_on_the_cpu_spans_decide() -> None:
    events = [
        *MARKS,
        Event("aten::mm", 10, 30),
        Event("aten::stack", 72, 5),  # by the loader
        Event("gloo:all_reduce", 30, 30),
        Event("gloo:all_reduce", 74, 5),  # while a batch is waited for
        Event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 70, 10),
        Event("jobkit: own", 110, 10),
        Event("c10d::allreduce_", 111, 1),
        Event("gloo:broadcast", 120, 2),  # which was issued before it, by another thread of Gloo's
        Event("gloo:all_reduce", 125, 50),  # which was issued in it
        Event("gloo:all_reduce", 180, 10),
        Event("aten::mm", 300, 10),
    ]
    fields = measured(events, gpu=False)
    assert fields and fields["steps"] == 2
    assert [[round(1e6 * x) for x in row] for row in fields["parts"]] == [
        [100, 30, 20, 10, 40], [100, 0, 12, 0, 88]
    ]  # fmt: skip
    assert fields["collectives"] == [
        [0, "gloo:all_reduce", 30, 30],
        [0, "gloo:all_reduce", 74, 5],
        [1, "gloo:broadcast", 120, 2],
        [1, "gloo:all_reduce", 180, 10],
    ]
    assert fields["exposed"] == [[40, 60], [120, 122], [180, 190]]
    assert measured(events[:1], gpu=False) is None


def test_on_a_gpu_kernels_decide() -> None:
    events = [
        *MARKS,
        Event("aten::mm", 0, 200),  # on the host
        Event("gemm", 10, 50, "kernel"),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 50, 40, "kernel"),
        Event("nccl:all_reduce", 50, 150, "annotation"),
        Event("jobkit: own", 5, 10),
        Event("c10d::allreduce_", 6, 1),  # by Gloo: no kernel
        Event("enumerate(DataLoader)#x.__next__", 80, 60),
        Event("Memcpy HtoD", 150, 10, "gpu_memcpy"),
    ]
    fields = measured(events, gpu=True)
    assert fields and [round(1e6 * x) for x in fields["parts"][0]] == [100, 30, 15, 25, 30]
    assert fields["collectives"] == [[0, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 40]]
