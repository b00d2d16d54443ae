"""The same work for each of many items, by as many processes as there are cores."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

SHARE = 100  # small files to be read: the least for a further process
_MESSAGES = 5  # of such a share
_MOST_WORKERS = 8  # a login node has other users
_FORK = multiprocessing.get_context("fork")

T = TypeVar("T")
R = TypeVar("R")


def in_order(work: Callable[[T], R], items: Sequence[T], share: int | None = None) -> Iterator[R]:
    """work(item) for each item, in order; of many items each forked process takes a part.

    share: the least number of items that is worth a further process; None: SHARE.
    The items are not sent, as the processes are forked; what comes back is pickled. What a process
    does not give, as it was killed or the work raised, is done here, where it may raise.
    """
    share = share or SHARE
    workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS, len(items) // share)
    if workers < 2 or threading.active_count() > 1:  # a lock that a thread holds would stay locked
        yield from map(work, items)
        return
    size = max(1, share // _MESSAGES)
    chunks = [items[i : i + size] for i in range(0, len(items), size)]
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(_worker(work, chunks[i::workers])) for i in range(workers)]
        for number, chunk in enumerate(chunks):
            done: list[R] | None = _next(pipes[number % workers])
            yield from map(work, chunk) if done is None else done


def _next(pipe: Connection | None) -> list[R] | None:
    """What a process made of its next chunk; None where it ended before."""
    if pipe is None:
        return None
    try:
        found: list[R] = pipe.recv()
    except (EOFError, OSError):
        return None
    return found


@contextlib.contextmanager
def _worker(work: Callable[[T], R], chunks: Sequence[Sequence[T]]) -> Iterator[Connection | None]:
    """A process that works on the chunks: where its results come from; None if there is none."""
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_give, args=(work, chunks, ours, theirs), daemon=True)
    with ours:
        try:
            process.start()
        except OSError:  # no more processes, or no memory for one
            theirs.close()
            yield None
            return
        theirs.close()
        try:
            yield ours
        finally:
            process.kill()
            process.join()


def _give(
    work: Callable[[T], R], chunks: Sequence[Sequence[T]], other: Connection, pipe: Connection
) -> None:
    """Send what each chunk becomes; end in silence where nobody reads it any more."""
    other.close()  # else a write would wait forever once the reader was killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the reader gets it too
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(Exception):  # the reader does the rest, and says what is wrong
        for chunk in chunks:
            pipe.send([work(item) for item in chunk])
    os._exit(0)  # nothing that the reader has to do as it ends is done here too
