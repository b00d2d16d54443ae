"""What --checkpoint-every may be, injected faults, and untrusted pickles: without torch."""

import io
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.errors import UsageError
from jobkit.payload.guard import faults
from jobkit.payload.guard.stopping import StopRequest
from jobkit.payload.unpickle import restricted_load
from jobkit.spec.every import Every
from jobkit.spec.runspec import RunSpec


@pytest.mark.parametrize(
    ("text", "every"),
    [
        (None, Every()),
        ("epoch", Every(epochs=True)),
        ("200", Every(iterations=200)),
        ("30s", Every(seconds=30.0)),
        ("0.2s", Every(seconds=0.2)),
        ("10m", Every(seconds=600.0)),
        ("1.5h", Every(seconds=5400.0)),
    ],
)
def test_every_is_epochs_iterations_or_a_time(text: str | None, every: Every) -> None:
    assert Every.of(text) == every
    assert RunSpec(checkpoint_every=text).checkpoint_every == text


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "0s", "0.0m", "epochs", "1d", "1.5", "s", "1e3s", "1..2s", "१s", "30s "]
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be epoch, a number of iterations"):
        RunSpec(checkpoint_every=text)


@given(st.text())
def test_any_text_is_read_or_clearly_refused(text: str) -> None:
    try:
        every = Every.of(text)
    except UsageError:
        return
    assert sum((every.epochs, bool(every.iterations), bool(every.seconds))) == 1


def test_checkpoints_are_no_part_of_a_runs_identity() -> None:
    plain = RunSpec(epochs=2)
    often = RunSpec(
        epochs=2, checkpoint_every="30s", checkpoint_keep=5, checkpoint_async=True,
        stop_signal="USR1",
    )  # fmt: skip
    assert often.run_id == plain.run_id


def planned(text: str, attempt: int = 0, rank: int = 0) -> faults.PlannedFault | None:
    return faults.planned(attempt, rank, environ={faults.VARIABLE: text})


def test_a_fault_is_injected_in_one_rank_of_one_attempt() -> None:
    assert planned("") is None
    assert planned("kill@5") == faults.PlannedFault("kill", 5, 0, 0)
    assert planned("kill@5:1") is None
    assert planned("hang@7:1", rank=1) == faults.PlannedFault("hang", 7, 1, 0)
    assert planned("hang@7:1", attempt=1, rank=1) is None
    assert planned("usr2@7:1:2", attempt=2, rank=1) == faults.PlannedFault("usr2", 7, 1, 2)


def test_a_fault_waits_for_its_iteration() -> None:
    fault = faults.PlannedFault("raise", 3, 0, 0)
    fault.inject(2, StopRequest())
    with pytest.raises(faults.InjectedFault, match="after iteration 3"):
        fault.inject(3, StopRequest())


@pytest.mark.parametrize("text", ["kill", "kill@", "kill@x", "die@3", "kill@3:1:2:3", "kill@-1"])
def test_a_fault_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"must be KIND@ITERATION\[:RANK\[:ATTEMPT\]\]"):
        planned(text)


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("was-here",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_a_pickle_would_call_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps({"deep": [Hostile()]}, protocol)
    with pytest.raises(pickle.UnpicklingError, match="is not allowed in this file"):
        restricted_load(io.BytesIO(content), {("pathlib", "PurePosixPath")})
    assert list(tmp_path.iterdir()) == []
    plain = {"a": [1, 2.5, "text", None]}
    assert restricted_load(io.BytesIO(pickle.dumps(plain, protocol)), set()) == plain
