"""The table of threads against processes: what is compared, and when one is called faster."""

from dataclasses import replace

import pytest

from jobkit.analysis.findings.threads import thread_lines
from support.measured_study import results_of


def lines(rates: dict[int, tuple[float, ...]], threads: dict[int, int], **cells) -> list[str]:
    results = results_of({"ddp": rates})
    used = results.runs["world_size"].map(threads)
    return thread_lines(
        replace(results, runs=results.runs.assign(device_type="cpu", threads_used=used, **cells))
    )


def test_the_fastest_way_comes_first_and_is_named_where_every_repeat_agrees() -> None:
    found = lines({1: (1000, 1010, 990), 4: (1500, 1490, 1510)}, {1: 4, 4: 1})
    assert found == [
        "4 cores as threads or processes, the fastest first:",
        "  4 processes x 1 thread (ddp): 1,500 images/s",
        "  1 process x 4 threads (ddp): 1,000 images/s",
        "4 processes x 1 thread (ddp) is faster than every other way in each repeat",
    ]


def test_repeats_that_overlap_or_are_missing_decide_nothing() -> None:
    assert "none is faster" in lines({1: (1000, 1300), 4: (1200, 1400)}, {1: 4, 4: 1})[-1]
    assert "one repeat alone" in lines({1: (1000,), 4: (1200,)}, {1: 4, 4: 1})[-1]


@pytest.mark.parametrize(
    ("threads", "cells"),
    [
        ({1: 1, 4: 1}, {}),  # more cores for more processes: scaling, and no division
        ({1: 4, 4: 1}, {"device_type": "cuda"}),
        ({1: 4, 4: 1}, {"nodes": 2}),
        ({1: 4, 4: 1}, {"status": "failed"}),
        ({1: 4, 4: None}, {}),
    ],
)
def test_other_studies_have_no_such_table(threads, cells) -> None:
    results = results_of({"ddp": {1: (1000, 1010), 4: (1500, 1490)}})
    used = results.runs["world_size"].map(threads)
    runs = results.runs.assign(**({"device_type": "cpu", "threads_used": used} | cells))
    assert thread_lines(replace(results, runs=runs)) == []


def test_a_size_that_leaves_a_core_idle_is_left_out() -> None:
    found = lines({1: (1000, 1001), 2: (1200, 1201), 4: (900, 901)}, {1: 6, 2: 3, 4: 1})
    assert found[0].startswith("6 cores") and len(found) == 4
