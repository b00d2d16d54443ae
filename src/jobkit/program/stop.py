"""The request to stop early, which all ranks must answer at the same step."""

import os
import signal
import sys
import threading
from typing import Any

from jobkit.program.process import distributed, guarded


class StopRequest:
    """Whether the stop signal came to any rank: the answer is the same on all of them."""

    def __init__(self) -> None:
        self.on, self._came, self._agreed = True, False, False
        self._group: Any = None
        self._pending: Any = None
        self._before: Any = None
        self._asked = False

    def listen(self) -> None:
        """Receive the stop signal (JOBKIT_STOP_SIGNAL, else USR2), in the main thread only."""
        number = signal.Signals[f"SIG{os.environ.get('JOBKIT_STOP_SIGNAL') or 'USR2'}"]
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(number, self._receive)

    def _listen_to_term(self) -> None:
        """In a pod TERM is the only warning: take it, unless the program handles it itself."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._received_term)
            os.register_at_fork(after_in_child=_default_term)  # the end of a worker process

    def _received_term(self, number: int, frame: Any) -> None:
        self._came = True

    def _receive(self, number: int, frame: Any) -> None:
        self._came = True
        if callable(self._before):
            self._before(number, frame)

    @guarded
    def requested(self) -> bool:
        """Ask the other ranks; their answers are read at the next call, so that none waits."""
        if not self._asked:
            self._asked = True  # a program that never asks ends by TERM as usual
            if os.environ.get("JOBKIT_POD"):
                self._listen_to_term()
        dist = distributed()
        if dist is None or dist.get_world_size() == 1:
            return self._came
        if self._group is None:  # on the CPU: a GPU need not be synchronised for it
            self._group = dist.new_group(backend="gloo")
        if self._pending:
            work, flag = self._pending
            work.wait()
            self._agreed = self._agreed or bool(flag)
        flag = sys.modules["torch"].tensor(int(self._came))
        self._pending = (
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True),
            flag,
        )
        return self._agreed


def _default_term() -> None:
    """Restore the default handling of TERM in a forked child."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
