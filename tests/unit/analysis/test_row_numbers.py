"""Numbers of results.csv from records by hand: each from the right record, and of the right one."""

from typing import Any

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.rows import result_row
from jobkit.analysis.collect.steps import observed_windows
from jobkit.analysis.scaling.spread import outliers
from jobkit.outcome.state import RunState


def row(*records: tuple[str, dict[str, Any]], attempt: int = 0) -> dict[str, Any]:
    """The columns of a run with these records; it had 1,000 samples per epoch."""
    common = {"v": 1, "run_id": "r", "attempt": attempt, "rank": 0}
    start = {"kind": "run_start", "train_samples": 1000, **common}
    made = [start, *({"kind": kind, **common, **fields} for kind, fields in records)]
    for seq, record in enumerate(made):
        record |= {"seq": seq, "t": 100.0 + seq}
    state = RunState(status="ok", attempts=attempt + 1)
    return dict(result_row(None, state, RunRecords(records=made)))


def epoch(number: int, rate: float, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "epoch", {"epoch": number, "images_per_s": rate, **fields}


def test_the_time_of_an_epoch_is_by_the_median_rate() -> None:
    found = row(epoch(0, 10.0), epoch(1, 100.0), epoch(2, 200.0), epoch(3, 125.0))
    assert found["images_per_s"] == 125  # without the first, which has the warm-up
    assert found["time_per_epoch_s"] == 8


def test_losses_are_those_of_the_end_and_before_it_those_of_the_last_epoch() -> None:
    last = epoch(1, 100.0, val_loss=0.5, val_accuracy=0.7)
    ended = row(epoch(0, 1.0, val_accuracy=0.9), last, ("run_end", {"val_loss": 0.4}))
    assert (ended["val_loss"], ended["val_accuracy"], ended["best_val_accuracy"]) == (0.4, 0.7, 0.9)
    assert row(last)["val_loss"] == 0.5
    assert row(("run_end", {"val_loss": 0.4, "attempt": 0}), last, attempt=1)["val_loss"] == 0.5


def test_half_of_the_repeats_are_no_outliers() -> None:
    """They are its spread. The other sizes say how much sound runs differ."""
    sound = [[100.0, 101, 102, 100], [200.0, 201, 199, 200]]
    *_, half = outliers([*sound, [50.0, 100, 101, 200]])
    *_, one = outliers([*sound, [100.0, 101, 100, 50]])
    assert (half, one) == ([False] * 4, [False, False, False, True])


def test_a_window_in_which_one_rank_warms_up_is_not_compared() -> None:
    def window(rank: int, step: int, warmup: bool) -> dict[str, Any]:
        own = {"attempt": 0, "rank": rank, "step": step, "steps": 5, "wall_s": 1.0 + rank}
        return own | {"work": 10.0, "warmup": warmup}

    windows = [window(0, 5, False), window(1, 5, True), window(0, 10, False), window(1, 10, False)]
    found = observed_windows(windows, {"world_size": 2}, {})
    assert found is not None
    assert [(s.warmup, s.time_s, s.work) for s in found.steps] == [(True, 2, 20), (False, 2, 20)]
