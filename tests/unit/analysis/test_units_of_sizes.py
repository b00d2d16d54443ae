"""What the times of sizes are of where little or nothing was measured, and the unit of steps."""

from typing import Any

import pytest

from jobkit.analysis.collect.steps import Observation, Observed, rate_row, step_rows
from jobkit.analysis.scaling.sizes import sizes
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame


@pytest.mark.parametrize(
    ("run", "unit", "of"),
    [
        ({"strategy": "ddp", "status": "failed", "global_batch_size": 8}, "images/s", "epoch"),
        ({"strategy": "ddp", "status": "failed"}, "runs/h", "run"),  # a command, of ddp.py
        ({"strategy": "train", "status": "failed"}, "runs/h", "run"),
        ({"throughput": 0.5, "throughput_unit": "tokens/s"}, "tokens/s", "1 token"),
        ({"throughput": 0.05, "throughput_unit": "tokens/s"}, "tokens/s", "0.1 tokens"),
        ({"throughput": 5.0, "throughput_unit": "tokens/s"}, "tokens/s", "10 tokens"),
    ],
)
def test_what_a_time_is_of(run: dict[str, Any], unit: str, of: str) -> None:
    same = {"series": "s", "status": "ok", "nodes": 1, "ranks_per_node": 1, "world_size": 1}
    (size,) = sizes(frame([{"run_id": "r", **same, **run}], RESULTS))
    assert (size.throughput_unit, size.time_of) == (unit, of)


def test_the_unit_of_steps_is_that_of_the_run_s_rate() -> None:
    """Several steps of an optimizer on one batch: the work of some windows only is known."""
    first = Observation(steps=5, time_s=10.0, work=40, warmup=True)
    others = [Observation(steps=10, time_s=2.0)] * 2
    observed = Observed(steps=[first, *others], unit="samples", windows=True)
    row = rate_row(observed)
    assert (row["throughput"], row["throughput_unit"]) == (5.0, "steps/s")
    found = [(r["throughput"], r["throughput_unit"]) for r in step_rows(observed)]
    assert found == [(0.5, "steps/s"), (5.0, "steps/s"), (5.0, "steps/s")]
