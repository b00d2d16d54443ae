"""Folders and files of a run that this user may not read: said so, and the others are collected."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.results import collect
from jobkit.files import closed
from jobkit.metric.pattern import load_pattern
from jobkit.outcome.status import run_state
from jobkit.paths import write_json
from jobkit.spec.plan import Plan, Study
from support.fake_study import whole_study

SAMPLE = load_pattern("nanogpt").sample


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Closes a file or folder to this user, who may be root."""
    shut: list[str] = []

    def wrap(call: Callable[..., Any], below: str) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **more: Any) -> Any:
            text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if text.startswith(tuple(s + below for s in shut)):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
            return call(path, *args, **more)

        return wrapped

    # What is closed itself can be seen to be there.
    for name, below in (("open", ""), ("stat", "/"), ("scandir", "")):
        monkeypatch.setattr(os, name, wrap(getattr(os, name), below))
    return lambda path: shut.append(str(path))


def test_a_run_whose_folder_is_closed_is_said_to_be(close: Callable[[Path], None]) -> None:
    plan = whole_study(strategies=("ddp",), gpus=(1, 2))
    first, other = plan.runs
    paths = plan.paths.run(first)
    assert closed(paths.folder) == closed(paths.folder / "absent") == closed(paths.log) == ""
    close(paths.folder)
    assert closed(paths.folder) == "Permission denied"
    state = run_state(paths)
    assert state.status == "missing"
    assert state.reason == "its folder cannot be read: Permission denied"
    found = collect("s")
    assert dict(zip(found.runs["run_id"], found.runs["status"], strict=True)) == {
        first: "missing",
        other: "ok",
    }
    assert f"{first}/metrics cannot be read: Permission denied" in found.warnings()


def _of_a_pattern() -> Plan:
    """A study of two runs with a log each, that the pattern reads."""
    plan = Study(name="n", gpus=(1,), repeats=2, command=("x",), pattern="nanogpt").expand()
    plan.save()
    for paths in map(plan.paths.run, plan.runs):
        (paths.attempts / "0").mkdir(parents=True)
        paths.log.write_text(SAMPLE)
        write_json(paths.outcome(0), {"exit_code": 0, "status": "ok", "reason": ""})
        write_json(paths.job, {"launcher": "run.sh", "started": 1.0, "ended": 9.0, "exit_code": 0})
    return plan


def test_a_run_whose_log_is_closed_has_no_rate(close: Callable[[Path], None]) -> None:
    """Not that of its wall time either, of another unit than the others'."""
    plan = _of_a_pattern()
    first, other = plan.runs
    close(plan.paths.run(first).log)
    found = collect("n")
    rows = found.runs.set_index("run_id")
    assert list(rows["status"]) == ["ok", "ok"]
    assert rows["throughput"].isna()[first] and not rows["throughput"].isna()[other]
    assert found.sizes[0].note is None
    assert f"{first}/train.log cannot be read: Permission denied" in found.warnings()
