"""Where the processes of a preflight exchange facts: JSON lines over TCP, every wait bounded.

Rank 0 listens, the others connect. A process says hello, sends its message of a stage, and is
answered when the stage is over. A hello must prove the job's token, and messages are bounded in
size; beyond that the network between ranks is trusted.

torch's TCPStore is no substitute. Tried with torch 2.14: in its only thread the server looks up the
name of every client, so that a name server that hangs (which a preflight has to find) stops it for
5 s per client and more; a client keeps no timeout at a port whose program is silent, nor with a
server that has stopped; and nothing tells the coordinator that a client has ended.
"""

import asyncio
import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

Message = dict[str, Any]
STAGES = ("facts", "results")
_HELLO_S = 4.0  # for hello and its answer, which comes at once
_POLL_S = 0.05
_MESSAGE_BYTES = 1 << 18  # the names of 4,096 nodes are an eighth of it


class Unreachable(Exception):
    """The rendezvous cannot be reached. The text says why."""


def _decoded(line: bytes) -> Message:
    """Return the message of a line; raises OSError for none, ValueError for what is no message."""
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection was closed")
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def _proof(token: str, side: str) -> str:
    """Return what a side shows to prove that it has the token, which itself is never sent."""
    return hashlib.sha256(f"{side} {token}".encode()).hexdigest()


class Connection:
    """A rank's connection to the rendezvous at a port of the host; name: its rank and host.

    Raises Unreachable with what is there instead.
    """

    def __init__(self, host: str, port: int, token: str, name: Message) -> None:
        try:
            self._socket = socket.create_connection((host, port), _HELLO_S)
        except OSError as error:
            raise Unreachable(f"port {port}: {error.strerror or error}") from None
        self._file = self._socket.makefile("rb")
        with contextlib.suppress(OSError, ValueError):
            self.send({**name, "hello": _proof(token, "rank")})
            if self.receive(_HELLO_S).get("hello") == _proof(token, "rendezvous"):
                return
        self.close()
        raise Unreachable(f"port {port}: another program or another job listens there")

    def send(self, message: Message) -> None:
        """Send a message; raises OSError where the other side has closed."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> Message:
        """Return the next message; raises OSError (also for the timeout) or ValueError."""
        self._socket.settimeout(timeout_s)
        return _decoded(self._file.readline(_MESSAGE_BYTES))

    def close(self) -> None:
        """Close the connection; the other side sees its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Rendezvous:
    """Collects one message of each process, stage by stage, and answers all of them at once.

    A message of a stage is taken as it is: its sender has proved the token.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._members: set[asyncio.StreamWriter] = set()  # those who are connected now
        self._parts: dict[str, dict[asyncio.StreamWriter, Message]] = {s: {} for s in STAGES}
        self.hurried = False  # set: wait for no process any longer
        self.connected: list[Message] = []  # every hello, be it followed by a part or not

    async def serve(self, listener: socket.socket) -> None:
        """Start to serve connections."""
        await asyncio.start_server(self._serve, sock=listener, limit=_MESSAGE_BYTES, backlog=4096)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends, or breaks the rules."""
        # Cancelled: the process ends, and asyncio would print that it was. Before Python 3.11
        # asyncio's TimeoutError is no builtin one.
        ends = (OSError, ValueError, asyncio.TimeoutError, asyncio.CancelledError)
        with contextlib.suppress(*ends):
            hello = _decoded(await asyncio.wait_for(reader.readline(), _HELLO_S))
            if hello.get("hello") == _proof(self._token, "rank"):
                self._members.add(writer)
                self.connected.append(hello)
                self._write([writer], {"hello": _proof(self._token, "rendezvous")})
                while True:
                    self._take(writer, _decoded(await reader.readline()))
        self._members.discard(writer)
        writer.close()

    def _take(self, writer: asyncio.StreamWriter, message: Message) -> None:
        if message.get("stage") not in STAGES:
            raise ValueError("not a message of a preflight")
        self._parts[message["stage"]][writer] = message

    async def gather(self, stage: str, count: int, timeout_s: float) -> list[Message]:
        """Return the messages of a stage: of `count` processes, or of fewer once the time is over.

        In the later stage, those whose connection has ended are not waited for.
        """
        facts, parts = (self._parts[name] for name in (STAGES[0], stage))

        def complete() -> bool:
            gone = stage != STAGES[0] and not (facts.keys() & self._members) - parts.keys()
            return self.hurried or gone or len(parts) >= count

        await _until(complete, timeout_s)
        return list(parts.values())

    def answer(self, message: Message) -> None:
        """Send a message to every process that has sent its facts."""
        self._write(self._parts[STAGES[0]].keys() & self._members, message)

    async def finish(self, timeout_s: float) -> None:
        """Wait until the others have read their answers and closed."""
        await _until(lambda: not self._members, timeout_s)

    def _write(self, writers: Iterable[asyncio.StreamWriter], message: Message) -> None:
        for writer in writers:
            writer.write(json.dumps(message).encode() + b"\n")


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(_POLL_S)


def is_here(addresses: Iterable[str]) -> bool:
    """Return whether one of the addresses is this machine's: only then can it be bound."""
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
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def connect_or_listen(
    connect: Callable[[], Connection], port: int, *, listens: bool, timeout_s: float
) -> Connection | socket.socket:
    """Return the connection to the job's rendezvous, or a listener where there is none yet.

    listens: whether this process may be it: it is on the master's machine and believes that it is
    rank 0, as several may. Raises Unreachable.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            return connect()
        except Unreachable:
            if listens:
                with contextlib.suppress(OSError):  # taken: by another of the job's, or for good
                    return listen(port)
            if time.monotonic() > end:
                raise
        time.sleep(_POLL_S)
