"""A rank that hangs is told from those that wait for it, and says where it stands."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from jobkit.errors import Exit
from jobkit.payload import train
from jobkit.payload.distributed import Group
from jobkit.payload.guard import watchdog
from jobkit.payload.guard.setup import WAITS_IN
from jobkit.payload.guard.watchdog import Watchdog, location
from jobkit.payload.place import RankEnv
from support.cuts import DATA, write_models
from support.rigs import Result, Start

# hang: the rank's own code; locked: C code that keeps Python's lock, so that no thread runs.
HANGING = """
import ctypes, os, time
from own_models import plain

def at(step, act):
    model, calls = plain(), []

    def before(module, inputs):
        calls.append(1)
        if module.training and len(calls) == step and os.environ.get("RANK") == "1":
            act()

    model.register_forward_pre_hook(before)
    return model

def dawdle():
    while True:
        time.sleep(0.05)

def hang():
    return at(9, dawdle)

def locked():
    return at(9, lambda: ctypes.PyDLL(None).sleep(600))
"""
TIMEOUT_S = 8.0
HOW = (*DATA, "--epochs", "50", "--global-batch-size", "16", "--timeout-s", str(TIMEOUT_S))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("own"))
    (folder / "hanging.py").write_text(HANGING)
    return folder


def stuck(forge: Start, own: Path, *words: str, **env: str) -> Result:
    done = forge(2, *HOW, *words, cwd=str(own), env=env)
    assert None not in done.codes, done.out  # all ended by themselves
    assert 0 not in done.codes
    return done


def test_hanging_between_iterations(forge: Start, own: Path) -> None:
    words = ("--model", "own_models:plain", "--strategy", "fsdp")
    done = stuck(forge, own, *words, JOBKIT_FAULT="hang@5:1")
    assert done.outcome
    assert done.outcome["status"] == "failed"
    reason = done.outcome["reason"]
    assert reason.startswith("rank 1: no progress for ")
    assert "after iteration 5; stuck in faults.py:" in reason
    assert "(inject)" in reason
    log = done.paths.rank_log(0, 1).read_text()
    assert reason in log
    assert "most recent call first" in log
    assert 'faults.py", line' in log
    assert 'watchdog.py", line' in log  # all threads are there


@pytest.mark.long
def test_hanging_in_a_users_model(forge: Start, own: Path) -> None:
    done = stuck(forge, own, "--model", "hanging:hang")
    assert done.outcome
    assert done.outcome["reason"].startswith("rank 1: no progress for ")
    assert "stuck in hanging.py:" in done.outcome["reason"]
    assert 'hanging.py", line' in done.paths.rank_log(0, 1).read_text()


def test_a_rank_whose_interpreter_is_locked(forge: Start, own: Path) -> None:
    done = stuck(forge, own, "--model", "hanging:locked")
    log = done.paths.rank_log(0, 1).read_text()
    assert "Timeout (0:00:" in log
    assert 'hanging.py", line' in log
    assert done.outcome
    assert done.outcome["status"] == "failed"


class Ended(Exception):
    """Instead of the end of this process."""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A watchdog of 100 s that ends no process, and what it did."""
    found = SimpleNamespace(waits=True, reasons=[], stacks=[], armed=[])

    def ended(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(watchdog, "location", lambda *_: ("there.py:3 (f)", found.waits))
    later = lambda seconds, **_: found.armed.append(seconds)  # noqa: E731
    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    monkeypatch.setattr(Watchdog, "_write_stacks", lambda _, reason: found.stacks.append(reason))
    found.stop = SimpleNamespace(signal="")
    found.dog = Watchdog(3, 100.0, found.stop, sys.stderr, found.reasons.append, ())
    found.dog.beat("iteration 7")
    return found


def test_code_of_its_own_is_ended_first_and_waiting_last(watched: SimpleNamespace) -> None:
    reason = "rank 3: no progress for {:.1f} s after iteration 7; stuck in there.py:3 (f)"
    for silent_s in (0.0, 69.0, 75.0, 84.0):  # it may be waiting for others
        watched.dog._look(silent_s)
    assert watched.stacks == []
    for silent_s in (86.0, 90.0, 124.0):
        watched.dog._look(silent_s)
    assert watched.stacks == [f"{reason.format(86)}, maybe waiting for another rank"]
    with pytest.raises(Ended, match=str(int(Exit.FAILED))):
        watched.dog._look(126.0)
    assert watched.reasons == [reason.format(126)]
    watched.waits = False
    watched.dog._look(69.0)
    with pytest.raises(Ended):
        watched.dog._look(71.0)
    assert watched.reasons[1:] == [reason.format(71)]


def test_a_rank_that_is_told_to_end_has_fifteen_seconds(watched: SimpleNamespace) -> None:
    """Not --timeout-s: the scheduler kills soon, and nothing would be said."""
    turns = iter([False, False, True])

    def wait(_: float) -> bool:
        if watched.armed:
            watched.stop.signal = "SIGTERM"
        return next(turns)

    watched.dog._stopped = SimpleNamespace(wait=wait)
    watched.dog._watch()
    watched.dog._arm()
    assert watched.armed == [80.0, 80.0, 12.0]


class Pending:
    """A tensor whose values are not there yet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.tolist = self.lock.acquire  # blocks in C, as Tensor.tolist does


def standing(act: Callable[[], object], pending: Pending) -> tuple[str, bool]:
    """Where a thread waits, as the watchdog sees it."""

    def work() -> None:
        with contextlib.suppress(TypeError, ValueError):  # the lock's answer is no list
            act()

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident
    status, slept = Path(f"/proc/self/task/{thread.native_id}/stat"), 0
    while slept < 20:  # it computes until it has come to its wait, with all of a processor or not
        time.sleep(0.02)
        slept = slept + 1 if status.read_text().rpartition(")")[2].split()[0] == "S" else 0
    found = location(sys._current_frames()[thread.ident], tuple(WAITS_IN))
    pending.lock.release()
    thread.join(100)
    return found


@pytest.fixture
def pending() -> Pending:
    return Pending()


def test_the_sum_over_all_ranks(monkeypatch: pytest.MonkeyPatch, pending: Pending) -> None:
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pending)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    group = object.__new__(Group)
    group.place, group.device = RankEnv(), torch.device("cuda")
    place, waits = standing(lambda: group.reduce({"x": 1.0}, "sum"), pending)
    assert waits, place


def test_the_sums_of_an_evaluation(monkeypatch: pytest.MonkeyPatch, pending: Pending) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pending)
    strategy = SimpleNamespace(
        model=torch.nn.Identity(), share_buffers=lambda: None, data_rank=0, data_world_size=1
    )
    trainer = SimpleNamespace(
        strategy=strategy,
        data=SimpleNamespace(test=SimpleNamespace(labels=[]), device="cuda"),
        spec=SimpleNamespace(eval_batch_size=1),
        guard=None,
    )
    place, waits = standing(lambda: train.Trainer.evaluate(trainer), pending)  # type: ignore[arg-type]
    assert waits, place


def test_code_of_its_own_is_not_waiting() -> None:
    pending = Pending()
    place, waits = standing(pending.lock.acquire, pending)
    assert not waits and "test_watchdog.py" in place
