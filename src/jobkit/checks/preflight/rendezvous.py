"""Where the processes of a preflight meet: no ranks are trusted, and every wait has an end.

One process on the master's node opens the desk; the others find it there. Messages are JSON, one a
line. A process says hello, sends its part of a stage, and is answered when the stage is over. The
desk does not use torch's store: that one waits for ranks that it believes in.
"""

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
_HELLO_S = 4.0  # for an answer to hello; a desk answers at once, on a thread of its own
_PATIENCE_S = 3.0  # until another process of the master's node than rank 0 opens the desk


class Lost(Exception):
    """The desk cannot be reached, or has gone. The text says why."""


class Line:
    """One connection, of messages in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")

    def send(self, message: Message) -> None:
        """Send a message; raises OSError where the other side has gone."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None) -> Message:
        """The next message; raises OSError (also for the timeout) or ValueError for no message."""
        self._socket.settimeout(timeout_s)
        line = self._file.readline(1 << 24)
        if not line.endswith(b"\n"):
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a message of a preflight")
        return message

    def close(self) -> None:
        """Close the connection; the other side sees its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def clock_offset(line: Line, clock: Callable[[], float] = time.time) -> tuple[float, float]:
    """Seconds by which this clock is ahead of the desk's, and the bound of the error.

    By an exchange: the desk's time was read at some moment of the round trip, so its middle is
    wrong by half of the round trip at most. The quickest of five counts.
    """
    best = (0.0, float("inf"))
    for _ in range(5):
        sent, before = time.monotonic(), clock()
        line.send({"ping": True})
        there = float(line.receive(_HELLO_S)["time"])
        half = (time.monotonic() - sent) / 2
        if half < best[1]:
            best = (before + half - there, half)
    return best


class Desk:
    """Takes in a message of each process, stage by stage, and answers all of them at once."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener, self._token = listener, token
        self._changed = threading.Condition()
        self._lines: set[Line] = set()  # of those who sent a part, and are still there
        self._parts: dict[str, dict[Line, Message]] = {}
        self.heard: list[Message] = []  # every hello, be it followed by a part or not
        self._open = 0
        self._hurried = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one process until it goes; whoever is not of this job is told so, and let go."""
        line, ours = Line(connection), False
        try:
            hello = line.receive(_HELLO_S)
            ours = hello.get("hello") == self._token
            line.send({"hello": self._token})
            if ours:
                self._count(+1)
                self.heard.append(hello)
            while ours:
                message = line.receive(None)
                if "ping" in message:
                    line.send({"time": time.time()})
                else:
                    self._take(line, message)
        except (OSError, ValueError):
            pass  # it has gone: what it has not sent is missed by gather
        finally:
            line.close()
            if ours:
                self._count(-1, line)

    def _count(self, change: int, gone: Line | None = None) -> None:
        with self._changed:
            self._open += change
            self._lines -= {gone}
            self._changed.notify_all()

    def _take(self, line: Line, message: Message) -> None:
        with self._changed:
            self._parts.setdefault(str(message.get("stage")), {})[line] = message
            self._lines.add(line)
            self._changed.notify_all()

    def gather(self, stage: str, count: int, timeout_s: float) -> list[Message]:
        """What came for the stage: of `count` processes, or of fewer once the time is over.

        In a later stage than the first, nobody waits for those who have gone.
        """
        later = any(name != stage for name in self._parts)
        parts = self._parts.setdefault(stage, {})

        def over() -> bool:
            gone = later and parts.keys() >= self._lines
            return self._hurried or gone or len(parts) >= count

        with self._changed:
            self._changed.wait_for(over, timeout_s)
            return list(parts.values())

    def hurry(self) -> None:
        """Wait for nobody any longer. For a signal's handler: it takes no lock."""
        self._hurried = True
        threading.Thread(target=self._count, args=(0,), daemon=True).start()

    def answer(self, message: Message) -> None:
        """Send a message to every process that came."""
        with self._changed:
            lines = list(self._lines)
        for line in lines:
            with contextlib.suppress(OSError):
                line.send(message)

    def close(self, timeout_s: float) -> None:
        """Wait until the others have gone with their answers; then close."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, timeout_s)
        self._listener.close()


def is_here(addresses: Sequence[str]) -> bool:
    """Whether one of the addresses is this machine's: only then can it be bound."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return True
    return False


def listen(port: int) -> socket.socket:
    """Listen on all addresses of this machine; raises OSError where the port is taken."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=4096)


def _knock(host: str, port: int, hello: Message) -> Line:
    """A connection to this job's desk; raises Lost with what is there instead."""
    try:
        connection = socket.create_connection((host, port), _HELLO_S)
    except OSError as error:
        raise Lost(str(error.strerror or error)) from None
    line = Line(connection)
    try:
        line.send(hello)
        if line.receive(_HELLO_S).get("hello") == hello["hello"]:
            return line
        reason = "another job's preflight answers"
    except (OSError, ValueError):
        reason = "another program answers"
    line.close()
    raise Lost(reason)


def meet(
    host: str, ports: Sequence[int], hello: Message, *, here: bool, first: bool, timeout_s: float
) -> tuple[Line, Desk | None]:
    """Connect to the job's desk, opening it where that is this process's part.

    host: the master's name; hello: the job's token, and who this is; here: the master is this
    machine; first: this process believes that it is rank 0.
    Returns the connection, and the desk in the one process that keeps it. Raises Lost.
    """
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        reasons = []
        for port in ports:
            try:
                return _knock(host, port, hello), None
            except Lost as lost:
                reasons.append(f"port {port}: {lost}")
            if here and (first or waited > _PATIENCE_S):
                with contextlib.suppress(OSError):  # taken: by a brother just now, or for good
                    desk = Desk(listen(port), str(hello["hello"]))
                    return _knock(host, desk.port, hello), desk
                if waited < 1:
                    break  # a brother opens it at this moment: two desks would both miss ranks
            if time.monotonic() - start > timeout_s:
                break  # where packets are dropped, each port takes seconds
        if time.monotonic() - start > timeout_s:
            raise Lost("; ".join(reasons))
        time.sleep(0.05)
