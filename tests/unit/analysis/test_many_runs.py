"""Which runs of a large study the report lists."""

from types import SimpleNamespace
from typing import Any

import pandas as pd

from jobkit.analysis.report.many_runs import MOST_LISTED, MOST_OF_A_KIND, listed


def results(runs: list[dict[str, Any]], outliers: str | None = None) -> Any:
    sizes = {"series": "ddp", "nodes": 1, "throughput_unit": "images/s", "status": "ok"}
    rows = [{**sizes, "world_size": 1, "throughput": 100.0, **run} for run in runs]
    return SimpleNamespace(
        runs=pd.DataFrame(rows), scaling=pd.DataFrame({"outliers": [outliers, None]})
    )


def test_few_runs_are_all_listed() -> None:
    found = results([{"run_id": f"r{i}"} for i in range(MOST_LISTED)])
    assert listed(found) is found.runs


def test_of_many_those_to_look_at_are_listed_in_order() -> None:
    runs: list[dict[str, Any]] = [{"run_id": f"r{i}"} for i in range(MOST_LISTED + 100)]
    for i in range(100, 200):  # twice as large: as fast as their size
        runs[i] |= {"world_size": 2, "throughput": 200.0}
    runs[150] |= {"throughput": 150.0}  # slow for its size, though faster than those of one rank
    runs[20] |= {"throughput": 120.0}
    runs[30] |= {"status": "failed", "throughput": None}
    for i in range(210, 300):
        runs[i] |= {"status": "timeout", "throughput": None}
    found = [str(name) for name in listed(results(runs, "r40, r41"))["run_id"]]
    assert {"r150", "r20", "r30", "r40", "r41"} <= {*found}
    assert len(found) <= 4 * MOST_OF_A_KIND
    assert found == sorted(found, key=lambda name: int(name[1:]))
    assert sum(int(name[1:]) >= 210 for name in found) == MOST_OF_A_KIND - 1


def test_runs_without_any_rate_are_listed_by_their_status() -> None:
    none = [
        {"run_id": f"r{i}", "status": "failed", "throughput": None} for i in range(MOST_LISTED + 1)
    ]
    assert len(listed(results(none))) == MOST_OF_A_KIND
