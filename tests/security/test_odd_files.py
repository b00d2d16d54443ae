"""Files that vanish, go stale or cannot be read while a study is read; full disks while writing."""

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit import door
from support.fake_study import FakeRun, make_plan

NAMES = [(os, "open"), (os, "stat"), (os, "listdir"), (os, "scandir"), (io, "open")]


class Failing:
    """Counts the calls that touch files of a study; the one of a given number fails."""

    def __init__(self, logs: Path, code: int, fail: int) -> None:
        self.logs, self.code, self.fail, self.calls = str(logs), code, fail, 0
        self.hit: str | None = None

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.logs):
                self.calls += 1
                if self.calls == self.fail:
                    self.hit = os.fspath(path)
                    raise OSError(self.code, os.strerror(self.code), os.fspath(path))
            return call(path, *args, **more)

        return wrapped


@contextlib.contextmanager
def failing(logs: Path, code: int, number: int) -> Iterator[Failing]:
    """Let one call that touches a file of a study fail."""
    one = Failing(logs, code, number)
    before = [(place, name, getattr(place, name)) for place, name in NAMES]
    for place, name, call in before:
        setattr(place, name, one.wrap(call))
    builtins_open, builtins.open = builtins.open, io.open
    try:
        yield one
    finally:
        builtins.open = builtins_open
        for place, name, call in before:
            setattr(place, name, call)


def study() -> Path:
    """A study with a run that is ok, one that failed, and one at work."""
    plan = make_plan("s", strategies=("ddp",), gpus=(1, 2, 4))
    ok, failed, running = plan.runs
    folder = plan.paths.folder
    FakeRun(folder, ok, plan.runs[ok]).begin().train(0, 1, 2).end()
    FakeRun(folder, failed, plan.runs[failed]).begin().train(0).end("failed", "why", 1)
    FakeRun(folder, running, plan.runs[running]).begin().train(0).flush()
    plan.paths.run(running).job.write_text(f'{{"pid": {os.getpid()}, "started": 1}}')
    return folder


@pytest.mark.parametrize(
    ("command", "code"),
    [
        *(("status", code) for code in (errno.ENOENT, errno.EACCES)),
        ("collect", errno.ENOENT),
    ],
)
def test_any_file_may_vanish_at_any_moment(
    command: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    module, main = {
        "status": ("jobkit.launch.follow.status", "main"),
        "collect": ("jobkit.analysis.cli", "collect_main"),
    }[command]
    folder = study()
    assert door.run(module, main, [str(folder)]) in (0, 3)
    number, calls = 0, 1
    while number <= calls:  # until the one that was to fail was not reached
        number += 1
        with failing(folder, code, number) as one:
            ended = door.run(module, main, [str(folder)])
        calls = one.calls
        said = capsys.readouterr()
        # One line for what belongs to the whole study; a single run's file ends nothing.
        of_study = one.hit is None or folder in (Path(one.hit), Path(one.hit).parent)
        assert ended in (0, 3) or (of_study and said.err.count("\n") == 1), (one.hit, said.err)
    assert number > 20
