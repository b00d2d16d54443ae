"""Work on many items by several processes gives what one gives, whatever becomes of them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobkit import files
from jobkit.processes import process_start

ITEMS = list(range(95))
# A work of 300 items that ends only with its process: its workers tell their pids.
KILLED = """
import os, sys, time
from jobkit import files
files.os.sched_getaffinity = lambda _: {0, 1}
def work(item):
    print(os.getpid(), flush=True)
    time.sleep(0.05)
    return "x" * 100_000
for _ in files.in_order(work, range(300)):
    time.sleep(0.2)
"""


@pytest.fixture(autouse=True)
def _three_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SHARE", 10)
    monkeypatch.setattr(files.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(files.threading, "active_count", lambda: 1)  # others' may go on


def pid_and_square(item: int) -> tuple[int, int]:
    return os.getpid(), item * item


def test_results_come_in_order_and_few_items_are_done_here(monkeypatch) -> None:
    found = list(files.in_order(pid_and_square, ITEMS))
    assert [square for _, square in found] == [item * item for item in ITEMS]
    pids = {pid for pid, _ in found}
    assert pids and os.getpid() not in pids
    for count in (0, 1, 19):
        few = files.in_order(pid_and_square, ITEMS[:count])
        assert {pid for pid, _ in few} <= {os.getpid()}
    monkeypatch.setattr(files.threading, "active_count", lambda: 2)  # a fork could lock up
    assert {pid for pid, _ in files.in_order(pid_and_square, ITEMS)} == {os.getpid()}


@pytest.mark.parametrize("how", ["killed", "unpicklable"])
def test_what_a_process_does_not_give_is_done_here(how: str) -> None:
    here = os.getpid()

    def work(item: int) -> object:
        if os.getpid() != here and item == 50:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return lambda: None
        return item

    assert list(files.in_order(work, ITEMS)) == ITEMS
    with pytest.raises(ZeroDivisionError):
        list(files.in_order(lambda item: 1 // (item - 50), ITEMS))
    assert not multiprocessing.active_children()


def test_the_processes_end_with_one_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "pids"
    with out.open("w") as file:
        user = subprocess.Popen([sys.executable, "-c", KILLED], stdout=file)
    while len(workers := {int(word) for word in out.read_text().split()}) < 2:
        assert user.poll() is None
        time.sleep(0.05)
    user.kill()
    user.wait()
    while any(process_start(pid) for pid in workers):  # the test's own limit ends it
        time.sleep(0.05)
