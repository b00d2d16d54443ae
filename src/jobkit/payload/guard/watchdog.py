"""Ends a rank that makes no progress, after writing the stack of each of its threads.

If a rank hangs, all others wait for it in a collective, until its timeout (--timeout-s). The cause
must be reported first: a rank whose main thread is stuck in code of its own, not in torch, is ended
a little earlier than that. One that is stuck in torch may be waiting: it writes its stacks, and is
ended only if it is still there after the collectives' timeout.

The stacks are those of Python's threads, written by faulthandler into the rank's own log and to
the job's. A rank whose interpreter itself is stuck is ended by faulthandler's own C thread, which
writes them into the rank's log.
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

STOP_BOUND_S = 15.0  # from INT or TERM to the end of an iteration; Slurm's KillWait is 30 s
# Time without a beat, as a share of the timeout of a collective:
_OWN_CODE = 0.7  # in code of its own: ended
_STUCK = 0.8  # not even the watchdog's thread runs: ended by faulthandler's
_REPORT = 0.85  # in torch: its stacks are written
_IN_TORCH = 1.25  # in torch: ended
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LIBRARY = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")


class Watchdog:
    """Watches one rank from its first iteration on; beat() reports progress."""

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        stop: StopRequest,
        log: TextIO,
        before_exit: Callable[[str], None],
        waits_in: Sequence[str],
    ) -> None:
        """timeout_s: of collectives. before_exit: called with the reason before the process ends.

        waits_in: source files, beside torch's, in which a rank waits for others or for a disk.
        """
        self._waits_in = (_TORCH, *waits_in)
        self._rank, self._timeout_s, self._log, self._before_exit = (
            rank,
            timeout_s,
            log,
            before_exit,
        )
        self._poll_s = min(0.5, timeout_s / 20)
        self._stop, self._hurried, self._reported = stop, False, False
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
        """Report progress: the rank has reached this point."""
        self._where, self._beaten, self._reported = where, time.monotonic(), False

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            self._arm()
            if self._stop.signal in ("SIGINT", "SIGTERM") and not self._hurried:
                # SIGKILL comes next: a rank that does not react must report its stacks before.
                self._hurried, self._beaten = True, time.monotonic()
                self._timeout_s = min(self._timeout_s, STOP_BOUND_S)
            self._look(time.monotonic() - self._beaten)

    def _arm(self) -> None:
        """Have faulthandler's thread end the process, unless this is called again in time."""
        faulthandler.dump_traceback_later(_STUCK * self._timeout_s, exit=True, file=self._log)

    def _look(self, silent_s: float) -> None:
        """Judge a rank by the seconds since its last beat."""
        share = silent_s / self._timeout_s
        if share < _OWN_CODE:
            return
        place, waits = location(sys._current_frames()[self._watched], self._waits_in)
        reason = (
            f"rank {self._rank}: no progress for {silent_s:.1f} s after {self._where}; "
            f"stuck in {place}"
        )
        if not waits or share > _IN_TORCH:
            self._write_stacks(reason)
            self._before_exit(reason)
            os._exit(Exit.FAILED)
        if share > _REPORT and not self._reported:
            self._reported = True
            self._write_stacks(f"{reason}, maybe waiting for another rank")

    def _write_stacks(self, reason: str) -> None:
        """Write the stacks of all threads."""
        for stream in (self._log, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                print(f"{reason}; threads:", file=stream, flush=True)
                faulthandler.dump_traceback(file=stream, all_threads=True)


def location(frame: FrameType, waits_in: tuple[str, ...]) -> tuple[str, bool]:
    """Where a thread is, as text, and whether it may be waiting for other ranks there.

    That is the innermost function outside Python's standard library.
    """
    while frame.f_back and _of_library(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    place = f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"
    return place, code.co_filename.startswith(waits_in)


def _of_library(file: str) -> bool:
    return file.startswith(_LIBRARY) and "-packages" not in file
