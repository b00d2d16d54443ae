"""A rank that waits for others on a GPU is not taken for one that is stuck.

With NCCL a collective returns at once; the host waits where it reads the result. A lock plays the
device that has not computed it yet.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from jobkit.payload import train
from jobkit.payload.distributed import Group
from jobkit.payload.guard.setup import WAITS_IN
from jobkit.payload.guard.watchdog import location
from jobkit.payload.place import RankEnv


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
    assert not waits and "test_waiting_on_a_gpu.py" in place
