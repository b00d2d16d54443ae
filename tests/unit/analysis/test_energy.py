"""From samples to columns: load, energy, energy for each unit of work, and what is said of them."""

from dataclasses import replace
from typing import Any

import pytest

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.samples import use_row
from jobkit.analysis.collect.steps import Observation, Observed

SIZE = {"nodes": 2, "world_size": 2}


def samples(rank: int = 0, seconds: int = 11, watt: float = 100, **more: Any) -> list[Any]:
    """Samples of a rank, one per second from t = 1000, of a node that uses so many watts."""
    source = {"energy_source": "pm_counters (node)", "alone": True, "host": f"n{rank}"}
    return [
        {"v": 1, "attempt": 0, "rank": rank, "t": 1000.0 + s, "at_s": float(s), "kind": "sample"}
        | {"energy_node_j": watt * s, "cpu_busy": None if s == 0 else s / 10, **source, **more}
        for s in range(seconds)
    ]


STEPS = [Observation(step=s, steps=5, time_s=1.0, work=20.0, warmup=s == 5) for s in (5, 10, 15)]
WINDOWS = Observed(steps=STEPS, unit="images", windows=True)


def row_of(found: list[Any], observed: Observed = WINDOWS, **size: Any) -> dict[str, Any]:
    return use_row(RunRecords(of_ranks=found), observed, SIZE | size)


def test_energy_is_of_all_nodes_and_per_image() -> None:
    more = {"energy_gpu_j": 1.0}  # which is part of it
    found = samples(0, memory_mib=30.0, **more) + samples(1, watt=50, memory_mib=50.0, **more)
    row = row_of(found)
    assert row["energy_node_j"] == pytest.approx(1500)
    assert row["joules_per_work"] == pytest.approx(1500 / 60)
    assert (row["joules_of"], row["energy_source"]) == ("node", "pm_counters (node)")
    assert (row["cpu_busy_mean"], row["node_memory_max_mib"]) == (pytest.approx(0.55), 50.0)
    # Of one node that lacks a counter there is none.
    assert row_of(samples(0)).keys().isdisjoint({"energy_node_j", "joules_per_work"})


def test_energy_is_divided_by_the_work_that_was_done_for_it() -> None:
    for observed in (
        replace(WINDOWS, windows=False),  # of a line nobody knows which steps it has
        replace(WINDOWS, steps=[*STEPS, Observation(step=20, steps=5, time_s=1.0)]),
        replace(WINDOWS, steps=[replace(STEPS[1], attempt=1)]),
    ):
        row = row_of(samples(0), observed, nodes=1)
        assert row["energy_node_j"] == pytest.approx(1000)
        assert row.keys().isdisjoint({"joules_per_work", "joules_of"})


def test_a_gpu_that_ranks_share_is_counted_once() -> None:
    for uuids, hosts, watt in (
        (("GPU-a", "GPU-a"), ("n0", "n0"), 100),  # both ranks read the same counter
        (("GPU-a", "GPU-b"), ("n0", "n0"), 200),
        (("GPU-a", "GPU-a"), ("n0", "n1"), 200),
        (([], {}), ("n0", "n0"), 200),
    ):
        found = []
        for rank in (0, 1):
            for one in samples(rank, host=hosts[rank], gpu_uuids=uuids[rank]):
                one["energy_gpu_j"] = one.pop("energy_node_j")
                found.append(one | {"energy_source": "nvml (gpu)"})
        row = row_of(found, nodes=len(set(hosts)))
        assert row["energy_gpu_j"] == pytest.approx(10 * watt)
        assert row["joules_per_work"] == pytest.approx(10 * watt / 60)
        assert (row["joules_of"], row["energy_source"]) == ("gpu", "nvml (gpu)")


def test_a_counter_that_begins_again_in_a_restarted_process_adds_up() -> None:
    again = [s | {"t": s["t"] + 20, "at_s": s["at_s"] + 20} for s in samples(0)]
    assert row_of(samples(0) + again, nodes=1)["energy_node_j"] == pytest.approx(2000)


@pytest.mark.parametrize("wrong", ["x", True, None, [1], 10**400])
def test_a_sample_of_another_type_is_as_if_it_were_not_there(wrong: Any) -> None:
    found = samples(0)
    found[-1] |= {"energy_node_j": wrong, "cpu_busy": wrong}
    assert row_of(found, nodes=1) == row_of(found[:-1], nodes=1)
