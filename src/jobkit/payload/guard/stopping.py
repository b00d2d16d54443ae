"""The request to stop a job early, received as a signal; works before torch is imported.

A signal only sets a flag: the ranks agree between two iterations, save, and end. Before the first
iteration there is nothing to save, and INT and TERM end the process as usual.

The warning signal (USR2, or as --stop-signal says) comes from Slurm to every process of a step. It
is blocked, and a thread waits for it: child processes inherit that and survive it. INT and
TERM wake a thread as well: the main thread may wait in a collective, where no handler of Python's
is run.
"""

import os
import signal
import threading

_ENDING = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal asked this process to end."""

    def __init__(self) -> None:
        self.signal = ""  # the name of the first one

    def listen(self, warning: str) -> None:
        """Start to receive the warning signal, USR1 or USR2. In the main thread only."""
        number = signal.Signals[f"SIG{warning}"]
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        # Not ignored, as a child of a shell that ignores it would be: it could not be waited for.
        signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._wait, args=(number,), daemon=True).start()

    def listen_to_all(self) -> None:
        """Receive INT and TERM too, once iterations have begun. In the main thread only."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _ENDING:
            signal.signal(number, lambda *_: None)  # with a handler, C writes to the pipe
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _wait(self, number: signal.Signals) -> None:
        while True:
            self._receive(signal.sigwait({number}))

    def _read(self, pipe: int) -> None:
        while number := os.read(pipe, 1):
            if number[0] in _ENDING:
                self._receive(number[0])

    def _receive(self, number: int) -> None:
        self.signal = self.signal or signal.Signals(number).name


def _forget() -> None:
    """Restore the default signal handling in a forked child."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
