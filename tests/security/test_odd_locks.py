"""A file system without locks: one holder at a time all the same, and none that has ended."""

import errno
import fcntl
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jobkit import locks
from jobkit.errors import UsageError
from jobkit.launch import lock as launcher_lock
from jobkit.locks import locked, owner_file
from jobkit.paths import StudyPaths
from jobkit.payload.data.cache import ensure_cache
from jobkit.payload.data.sources import find_source


@pytest.fixture(autouse=True, params=["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def _no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(getattr(errno, request.param), "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "_said", set())
    monkeypatch.setattr(locks, "MOST_WAIT_S", 30.0)  # a test that waits in vain must end


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "lock")


def test_one_holder_at_a_time_and_nothing_left_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, wait=False) as held:
        assert held and owner_file(path).exists()
        with pytest.raises(BlockingIOError), locked(path, wait=False):
            pass
    assert left(tmp_path) == []
    with locked(path, wait=False) as held:
        assert held


def test_it_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with locked(tmp_path / "lock", wait=False):
            pass
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has no locks" in said


def owner(path: Path, **fields: Any) -> bytes:
    """Leave an owner's file; return its content."""
    record = {"pid": 1, "pid_start": 0, "host": socket.gethostname(), **fields}
    owner_file(path).write_text(json.dumps(record))
    return owner_file(path).read_bytes()


def ended() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("wait", [True, False])
def test_an_owner_that_has_ended_is_passed_over(tmp_path: Path, wait: bool) -> None:
    path = tmp_path / "lock"
    for fields in ({"pid": ended(), "pid_start": 5}, {"pid": 1, "pid_start": -7}, {"pid": "x"}):
        owner(path, **fields)
        with locked(path, wait) as held:
            assert held
        assert left(tmp_path) == []


def test_an_owner_on_another_machine_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    content = owner(path, host="another")
    with pytest.raises(BlockingIOError), locked(path, wait=False):
        pass
    monkeypatch.setattr(locks, "MOST_WAIT_S", 0.5)
    with locked(path, wait=True) as held:  # who waits goes on without it after a while
        assert not held
    assert owner_file(path).read_bytes() == content


def test_a_launcher_names_the_file_that_bars_it(tmp_path: Path) -> None:
    study = StudyPaths(tmp_path)
    owner(study.launcher_lock, host="another")
    with pytest.raises(UsageError, match=r"remove .*\.launcher\.lock\.owner"):
        launcher_lock.check_free(study) or launcher_lock.held(study).__enter__()


def test_many_at_once_take_turns(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "lock", 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(3):
            with locked(path, wait=True):
                inside += 1
                most = max(most, inside)
                time.sleep(0.01)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1 and left(tmp_path) == []


def test_a_cache_is_built_there(tmp_path: Path) -> None:
    said: list[str] = []
    cache = ensure_cache(find_source("synthetic", tmp_path, 8, 8), tmp_path, said.append)
    assert (cache / "manifest.json").exists()
    assert [p.name for p in cache.parent.iterdir() if "owner" in p.name] == []
