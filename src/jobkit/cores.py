"""The same work for each of many items, by as many processes as there are cores."""

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

SHARE = 100  # small files to be read: the least for a further process
_MAX_WORKERS = 8  # a login node has other users
_INHERITED: list[Any] = []  # of a worker: the work and the items, which are not pickled

T = TypeVar("T")
R = TypeVar("R")


def in_order(work: Callable[[T], R], items: Sequence[T], share: int | None = None) -> Iterator[R]:
    """work(item) for each item, in order; of many items each forked process takes a part.

    share: the least number of items that is worth a further process; None: SHARE. Where a process
    fails, the rest is done here, where it may raise.
    """
    share, done = share or SHARE, 0
    workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS, len(items) // share)
    if workers > 1 and threading.active_count() == 1:  # a lock that a thread holds stays locked
        fork = multiprocessing.get_context("fork")
        try:
            with ProcessPoolExecutor(workers, fork, _begin_worker, (work, items)) as pool:
                for result in pool.map(_do, range(len(items)), chunksize=max(1, share // 5)):
                    yield result
                    done += 1
        except Exception:
            pass
    yield from map(work, items[done:])


def _begin_worker(work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    _INHERITED[:] = work, items
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the reader gets it too
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the reader


def _do(index: int) -> Any:
    work, items = _INHERITED
    return work(items[index])
