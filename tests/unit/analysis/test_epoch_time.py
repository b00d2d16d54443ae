"""The time of an epoch of a program with a meter: in results.csv, and as the time of a size."""

from typing import Any

import pytest

from jobkit.analysis.collect.epoch_time import epoch_time, steps_of_epoch
from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.steps import TRAINING, Observed
from jobkit.analysis.scaling.sizes import EPOCH, sizes
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame


def window(steps: object, epoch: object, attempt: int = 0) -> dict[str, Any]:
    return {"v": 1, "kind": "window", "attempt": attempt, "steps": steps, "epoch": epoch}


def epoch(number: int, attempt: int = 0) -> dict[str, Any]:
    return {"v": 1, "kind": "epoch", "attempt": attempt, "epoch": number}


@pytest.mark.parametrize(
    ("records", "steps"),
    [
        ([window(5, None), window(15, 0), epoch(0)], 20),  # one epoch, with its warm-up
        ([window(20, 0), epoch(0), window(9, 1), window(1, 1), epoch(1)], 10),
        ([window(20, 0), epoch(0), window(9, 1)], 20),  # the second did not end
        # Stopped within epoch 1, of which the second attempt makes what is left.
        (
            [
                window(20, 0), epoch(0), window(9, 1),
                window(11, 1, 1), epoch(1, 1), window(20, 2, 1), epoch(2, 1),
            ],
            20,
        ),
        ([window(9, None), window(11, 1, 1), epoch(1, 1)], None),
        ([window(20, None)], None),
        ([window("20", 0), epoch(0)], None),
        # Told at each fifth epoch, or counted from 1.
        ([window(390, 0), epoch(0), *[window(150, 1)] * 13, epoch(5)], 390),
        ([window(300, None), window(90, 1), epoch(1), window(390, 2), epoch(2)], 390),
        ([window(390, None), epoch(1)], None),
        ([window(20, 0), epoch(0), epoch(0), window(20, 1), epoch(1)], 20),
    ],
)  # fmt: skip
def test_the_steps_of_whole_epochs(records: list[dict[str, Any]], steps: int | None) -> None:
    assert steps_of_epoch(RunRecords(records)) == steps


def test_the_time_follows_from_the_steps_of_a_meter() -> None:
    records = RunRecords([window(20, 0), epoch(0)])
    speed = {"step_time_s": 0.5}
    metered = Observed(windows=True, source="meter")
    assert epoch_time(metered, records, speed) == {"time_per_epoch_s": 10.0}
    for other in (None, Observed(source="metric lines"), Observed(windows=True, source=TRAINING)):
        assert epoch_time(other, records, speed) == {}
    assert epoch_time(metered, records, {}) == {}


def found(works: tuple[float, ...], more: tuple[float | None, ...] = ()) -> list[Any]:
    """Sizes of a metered series whose epochs have this work, and the runs of another one."""
    rows = []
    for series, amounts in (("own", works), ("other", more)):
        for at, work in enumerate(amounts):
            rate = 100.0 * 2**at
            rows.append(
                {
                    "run_id": f"{series}{at}", "series": series, "status": "ok", "nodes": 1,
                    "ranks_per_node": 2**at, "world_size": 2**at, "throughput": rate,
                    "throughput_unit": "samples/s", "step_time_s": 0.25,
                    "time_per_epoch_s": work / rate if work else None,
                }
            )  # fmt: skip
    return sizes(frame(rows, RESULTS))


def test_sizes_with_the_same_epoch_have_its_time() -> None:
    one, two = found((1000.0, 1008.0))
    assert (one.time_of, one.time_s, one.time_amount) == (EPOCH, 10.0, 1000.0)
    assert (two.time_of, two.time_s) == (EPOCH, pytest.approx(5.04))
    assert one.step_time_s == 0.25


def test_epochs_that_grow_with_the_ranks_or_that_others_lack_are_not_compared() -> None:
    for made in (found((1000.0, 2000.0)), found((1000.0, 1000.0), (None, None))):
        assert {size.time_of for size in made} == {"1,000 samples"}
        assert [size.time_s for size in made[:2]] == [10.0, 5.0]
