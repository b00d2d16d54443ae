"""From samples to columns: load, energy, energy for each unit of work, and what is said of them."""

from dataclasses import replace
from typing import Any

import pytest

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.samples import use_row
from jobkit.analysis.collect.steps import Observation, Observed
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
from jobkit.outcome.slurm_jobs import read_sacct
from support.measured_study import results_from, runs_of

SIZE = {"nodes": 2, "world_size": 2}


def samples(rank: int = 0, seconds: int = 11, watt: float = 100, **more: Any) -> list[Any]:
    """Samples of a rank, one per second from t = 1000, of a node that uses so many watts."""
    source = {"energy_source": "pm_counters (node)", "alone": True, "host": f"n{rank}"}
    return [
        {"v": 1, "attempt": 0, "rank": rank, "t": 1000.0 + s, "at_s": float(s), "kind": "sample"}
        | {"energy_node_j": watt * s, "cpu_busy": None if s == 0 else s / 10, **source, **more}
        for s in range(seconds)
    ]


def windows() -> tuple[list[Any], Observed]:
    """A warm-up until t = 1002.5, then windows until 1004.5 and 1008.5, of 40 images in all."""
    ends = ((5, 1002.5, True), (10, 1004.5, False), (15, 1008.5, False))
    found = [
        {"v": 1, "kind": "window", "attempt": 0, "rank": 0, "step": step, "t": t, "warmup": warm}
        for step, t, warm in ends
    ]
    steps = [Observation(step=s, steps=5, time_s=1.0, work=20.0, warmup=w) for s, _, w in ends]
    return found, Observed(steps=steps, unit="images", windows=True)


def row_of(found: list[Any], slurm_j: float | None = None, **size: Any) -> dict[str, Any]:
    of_windows, observed = windows()
    return use_row(RunRecords(of_windows, of_ranks=found), observed, SIZE | size, slurm_j)


def test_energy_is_of_all_nodes_and_per_image_without_the_warm_up() -> None:
    row = row_of(samples(0, memory_mib=30.0) + samples(1, watt=50, memory_mib=50.0))
    assert row["energy_node_j"] == pytest.approx(1500)
    assert row["joules_per_work"] == pytest.approx(150 * 6 / 40)  # from 1002.5 to 1008.5
    assert (row["joules_of"], row["energy_source"]) == ("node", "pm_counters (node)")
    assert (row["cpu_busy_mean"], row["node_memory_max_mib"]) == (pytest.approx(0.55), 50.0)
    # Of one node that lacks a counter there is none.
    row = row_of(samples(0))
    assert row.keys().isdisjoint({"energy_node_j", "joules_per_work"})


def test_an_end_of_rank_0s_windows_that_no_other_rank_shares_is_passed_over() -> None:
    of_windows, observed = windows()
    own = of_windows[1] | {"step": 7, "t": 1003.5}
    printed = {"kind": "window", "attempt": [0], "step": 8, "t": 1004.5}  # by another program
    records = RunRecords([of_windows[0], own, *of_windows[1:], printed], of_ranks=samples(0))
    row = use_row(records, observed, SIZE | {"nodes": 1}, None)
    assert row["joules_per_work"] == pytest.approx(100 * 6 / 40)
    # A pattern's line may be of one step, at the last step of a window of many: of no window.
    lines = replace(observed, windows=False, source="pattern bar")
    row = use_row(RunRecords(of_windows, of_ranks=samples(0)), lines, SIZE | {"nodes": 1}, None)
    assert row["energy_node_j"] == pytest.approx(1000)
    assert row.keys().isdisjoint({"joules_per_work", "joules_of"})


@pytest.mark.parametrize(
    ("uuids", "hosts", "watt"),
    [
        (("GPU-a", "GPU-a"), ("n0", "n0"), 100),  # both ranks read the same counter
        (("GPU-a", "GPU-b"), ("n0", "n0"), 200),
        (("GPU-a", "GPU-a"), ("n0", "n1"), 200),
        ((None, None), ("n0", "n0"), 200),
        (([], {}), ("n0", "n0"), 200),
    ],
)
def test_a_gpu_that_ranks_share_is_counted_once(uuids: Any, hosts: Any, watt: float) -> None:
    found = []
    for rank in (0, 1):
        for one in samples(rank, host=hosts[rank], gpu_uuids=uuids[rank]):
            one["energy_gpu_j"] = one.pop("energy_node_j")
            found.append(one | {"energy_source": "nvml (gpu)"})
    row = row_of(found, nodes=len(set(hosts)))
    assert row["energy_gpu_j"] == pytest.approx(10 * watt)
    assert row["joules_per_work"] == pytest.approx(watt * 6 / 40)
    assert (row["joules_of"], row["energy_source"]) == ("gpu", "nvml (gpu)")


def test_a_counter_that_begins_again_in_a_restarted_process_adds_up() -> None:
    again = [s | {"t": s["t"] + 20, "at_s": s["at_s"] + 20} for s in samples(0)]
    assert row_of(samples(0) + again, nodes=1)["energy_node_j"] == pytest.approx(2000)


def test_slurms_energy_counts_for_the_whole_job_only_where_it_was_alone() -> None:
    own = [{k: v for k, v in s.items() if k != "energy_node_j"} for s in samples(0)]
    row = row_of(own, slurm_j=600.0)
    assert (row["energy_node_j"], row["joules_per_work"]) == (600.0, 600 / 60)
    assert row["energy_source"] == f"slurm ({row['joules_of']})" == "slurm (node, whole job)"
    assert "energy_node_j" not in row_of([s | {"alone": False} for s in own], slurm_j=600.0)


@pytest.mark.parametrize("wrong", ["x", True, None, [1], 10**400])
def test_a_sample_of_another_type_is_as_if_it_were_not_there(wrong: Any) -> None:
    found = samples(0)
    found[-1] |= {"energy_node_j": wrong, "cpu_busy": wrong}
    assert row_of(found, nodes=1) == row_of(found[:-1], nodes=1)


def test_what_slurm_did_not_gather_is_not_zero() -> None:
    absent = dict.fromkeys(("0", "4294967294", "", "18446744073709551614"))
    for text, joules in {"1700": 1700.0, **absent}.items():
        line = f"7|COMPLETED|0:0|00:00:20|n1|{text}\n"
        assert read_sacct(line)["7"].energy_j == joules


def test_the_energy_of_an_epoch_is_a_column_of_sizes() -> None:
    """On the larger of two sizes an image needs more energy."""
    rows = runs_of({"ddp": {1: [100.0], 2: [180.0]}})
    for row in rows:
        row |= {"joules_per_work": 2.0 * row["world_size"], "joules_of": "gpu"}
    results = results_from(frame(rows, RESULTS))
    assert [s.energy_kwh for s in results.sizes] == pytest.approx([100e3 / 3.6e6, 200e3 / 3.6e6])
