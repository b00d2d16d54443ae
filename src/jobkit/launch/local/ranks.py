"""Starts one process for each rank on this machine, as srun does in a job.

    python -m jobkit.launch.local.ranks --ranks 2 -- python train.py

Standard library only. When a rank fails, the others are ended; a signal reaches each rank.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from jobkit.errors import Parser, at_least, command

GRACE_S = 15.0  # from SIGTERM to SIGKILL; the launcher of a study waits longer
_LAST_LINES_S = 2.0  # for what a rank has printed last
_WRITING = threading.Lock()
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="jobkit.launch.local.ranks",
        description="Start one process for each rank, with torchrun's variables.",
        epilog="example:\n  python -m jobkit.launch.local.ranks --ranks 2 -- python train.py",
    )
    made.add_argument("--ranks", type=at_least(int, 1), required=True, metavar="N")
    made.add_argument("--nnodes", type=at_least(int, 1), default=1, metavar="N")
    made.add_argument("--node-rank", type=at_least(int, 0), default=0, metavar="K")
    made.add_argument("--shutdown-timeout", type=at_least(float, 0), default=GRACE_S, metavar="S")
    made.add_argument("--poll", type=at_least(float, 0.001), default=0.1, metavar="S")
    return made


class Ranks:
    """The processes of all ranks, from their start to their end."""

    def __init__(
        self,
        words: Sequence[str],
        ranks: int,
        *,
        nodes: int = 1,
        node: int = 0,
        grace_s: float = GRACE_S,
    ) -> None:
        self._grace_s = grace_s
        self._ending_since: float | None = None
        self._started = False
        self._early = list[int]()  # signals that came while the ranks were started
        self.code = 0
        for signum in (*_FORWARDED, *_ENDING):
            signal.signal(signum, self._heard)
        # Held until all has ended: torch binds it seconds later, which SO_REUSEADDR of both allows.
        self._held = _free_port() if "MASTER_PORT" not in os.environ else None
        port = int(self._held.getsockname()[1]) if self._held else None
        self._first = node * ranks
        self._processes = list[subprocess.Popen[bytes]]()
        self._copiers = list[threading.Thread]()
        for rank in range(ranks):
            env = _environment(rank, ranks, port, nodes, node)
            self._processes.append(self._start(words, env, ranks > 1))
        self._started = True
        for early in self._early:
            self._act(early)

    def _start(
        self, words: Sequence[str], env: dict[str, str], share: bool
    ) -> "subprocess.Popen[bytes]":
        """Start one rank. share: others write to the same output, so its lines are kept whole."""
        pipe = subprocess.PIPE if share else None
        # A session of its own: a signal to it reaches all that the rank has started.
        process = subprocess.Popen(
            words, env=env, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0
        )
        for source, target in ((process.stdout, 1), (process.stderr, 2)):
            if source is not None:
                copier = threading.Thread(target=_copy_lines, args=(source, target), daemon=True)
                copier.start()
                self._copiers.append(copier)
        return process

    def _heard(self, signum: int, _frame: FrameType | None) -> None:
        if self._started:
            self._act(signum)
        else:
            self._early.append(signum)

    def _act(self, signum: int) -> None:
        if signum in _ENDING:
            self.code = self.code or 128 + signum
            self._end()
        else:
            self._send(signum)

    def _send(self, signum: int) -> None:
        for process in self._processes:
            process.send_signal(signum)  # nothing, where it has ended

    def _end(self) -> None:
        """Ask every rank to end."""
        if self._ending_since is None:
            self._ending_since = time.monotonic()
            self._send(signal.SIGTERM)

    def wait(self, poll_s: float) -> int:
        """Wait for all ranks; return the code of the first that failed, else 0."""
        while True:
            codes = [process.poll() for process in self._processes]
            bad = [(self._first + rank, code) for rank, code in enumerate(codes) if code]
            if bad and not self.code:
                self._failed(*bad[0])
            if bad:
                self._end()
            if None not in codes:
                break
            if self._ending_since and time.monotonic() - self._ending_since > self._grace_s:
                self.kill()
            time.sleep(poll_s)
        self.kill()
        for copier in self._copiers:  # ends with the last process that has the pipe
            copier.join(_LAST_LINES_S)
        return self.code

    def _failed(self, rank: int, code: int) -> None:
        """Note the first failure. A rank that a signal ended could not say it itself."""
        self.code = code if code > 0 else 128 - code
        if code < 0:
            name = {s.value: s.name for s in signal.Signals}.get(-code, "unnamed")
            text = f"jobkit: error: rank {rank}: Signal {-code} ({name}) received\n"
            _write(2, text.encode())

    def kill(self) -> None:
        """Kill what is left of each rank's processes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _copy_lines(source: IO[bytes], target: int) -> None:
    """Copy whole lines, as srun does: each in one write, so that no other rank's comes between."""
    kept = b""
    while block := source.read(1 << 16):
        kept += block
        end = max(kept.rfind(b"\n"), kept.rfind(b"\r")) + 1  # a progress bar ends with the second
        if end:
            _write(target, kept[:end])
            kept = kept[end:]
    _write(target, kept + b"\n" if kept else b"")


def _write(target: int, data: bytes) -> None:
    with _WRITING, contextlib.suppress(OSError):  # nobody reads it any more
        while data:
            data = data[os.write(target, data) :]


def _free_port() -> socket.socket:
    """A socket that is bound and does not listen: no other program is given its port meanwhile."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def _environment(
    local_rank: int, ranks: int, port: int | None, nodes: int = 1, node: int = 0
) -> dict[str, str]:
    """The environment of a rank: torchrun's variables. Every node has the same number of ranks."""
    own = {"RANK": node * ranks + local_rank, "LOCAL_RANK": local_rank, "NODE_RANK": node}
    own |= {"WORLD_SIZE": nodes * ranks, "LOCAL_WORLD_SIZE": ranks}
    own |= {"MASTER_PORT": port} if port else {}
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return {**os.environ, "MASTER_ADDR": master, **{k: str(v) for k, v in own.items()}}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for them; return the exit code of the first that failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--")
    args = parser().parse_args(words[:end])
    size = {"nodes": args.nnodes, "node": args.node_rank}
    ranks = Ranks(words[end + 1 :], args.ranks, **size, grace_s=args.shutdown_timeout)
    return ranks.wait(args.poll)


if __name__ == "__main__":
    sys.exit(main(None))
