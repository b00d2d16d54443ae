"""Ends a rank that makes no progress, after it has said where each of its threads stands.

A rank that hangs has all others wait for it in a collective, until that has taken --timeout-s. The
one to blame must speak first: a rank whose main thread stands in code of its own, not in torch, is
ended a little earlier than that. One that stands in torch may be a waiting one: it leaves its
stacks, and is ended only when it is still there after the collectives' time.

The stacks are those of Python's threads, written by faulthandler into the rank's own log and to
the job's. A rank whose interpreter itself is stuck is ended by a thread of C's, which writes them
into the rank's log.
"""

import contextlib
import faulthandler
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch

from jobkit.errors import Exit
from jobkit.payload.guard.stopping import StopRequest

STOP_BOUND_S = 15.0  # from INT or TERM to an iteration's edge; Slurm's KillWait is 30 s
# In shares of the time that a collective may take, without a beat:
_TO_BLAME = 0.7  # in code of its own: ended
_STUCK = 0.8  # not even the watchdog's thread runs: ended by C's
_TELLING = 0.85  # in torch: its stacks are written
_WAITING = 1.25  # in torch: ended
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LIBRARY = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")


class Watchdog:
    """Watches one rank from its first iteration on. beat() says that it goes on."""

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        stop: StopRequest,
        log: TextIO,
        last_words: Callable[[str], None],
        waits_in: Sequence[str],
    ) -> None:
        """timeout_s: of collectives. last_words: told the reason before the process ends.

        waits_in: source files, beside torch's, in which a rank waits for others or for a disk.
        """
        self._waits_in = (_TORCH, *waits_in)
        self._rank, self._timeout_s, self._log, self._last_words = rank, timeout_s, log, last_words
        self._poll_s = min(0.5, timeout_s / 20)
        self._stop, self._hurried, self._told = stop, False, False
        self._beaten, self._where, self._stopped = time.monotonic(), "", threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._watched = threading.get_ident()

    def start(self) -> None:
        """Begin to watch the thread that calls this."""
        self._watched = threading.get_ident()
        self.beat("the start")
        self._arm()  # now: the interpreter may be stuck before the thread is on for the first time
        self._thread.start()

    def beat(self, where: str) -> None:
        """The rank has come so far."""
        self._where, self._beaten, self._told = where, time.monotonic(), False

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            self._arm()
            if self._stop.signal in ("SIGINT", "SIGTERM") and not self._hurried:
                # SIGKILL comes next: a rank that does not answer is to say where it stands before.
                self._hurried, self._beaten = True, time.monotonic()
                self._timeout_s = min(self._timeout_s, STOP_BOUND_S)
            self._look(time.monotonic() - self._beaten)

    def _arm(self) -> None:
        """Have C's thread end the process, unless it is put off again in time."""
        faulthandler.dump_traceback_later(_STUCK * self._timeout_s, exit=True, file=self._log)

    def _look(self, silent_s: float) -> None:
        """Judge a rank that was silent for so long."""
        share = silent_s / self._timeout_s
        if share < _TO_BLAME:
            return
        place, waits = standing(sys._current_frames()[self._watched], self._waits_in)
        reason = (
            f"rank {self._rank}: no progress for {silent_s:.1f} s after {self._where}; "
            f"it stands in {place}"
        )
        if not waits or share > _WAITING:
            self._tell(reason)
            self._last_words(reason)
            os._exit(Exit.FAILED)
        if share > _TELLING and not self._told:
            self._told = True
            self._tell(f"{reason}, where it may wait for another rank")

    def _tell(self, reason: str) -> None:
        """Write the stacks of all threads."""
        for stream in (self._log, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                print(f"{reason}; its threads:", file=stream, flush=True)
                faulthandler.dump_traceback(file=stream, all_threads=True)


def standing(frame: FrameType, waits_in: tuple[str, ...]) -> tuple[str, bool]:
    """Where a thread is, in words, and whether it may be waiting for other ranks there.

    What counts is the innermost function that is not of Python's own library.
    """
    while frame.f_back and _of_library(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    place = f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"
    return place, code.co_filename.startswith(waits_in)


def _of_library(file: str) -> bool:
    return file.startswith(_LIBRARY) and "-packages" not in file
