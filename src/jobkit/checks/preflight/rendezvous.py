"""Where the processes of a preflight exchange facts: JSON lines over TCP, every wait bounded.

Rank 0 listens, the others connect. A process proves the job's token, sends its message of a stage,
and is answered when the stage is over. Lines are bounded in size, and nothing is read of one that
has not proved the token; beyond that the network between ranks is trusted.

torch's TCPStore is no substitute. Tried with torch 2.14: in its only thread the server looks up the
name of every client, so that a name server that hangs (which a preflight has to find) stops it for
5 s per client and more; a client keeps no timeout at a port whose program is silent, nor with a
server that has stopped; and nothing tells the coordinator that a client has ended.
"""

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

Message = dict[str, Any]
FACTS, RESULTS = "facts", "results"  # the stages
_HELLO_S = 4.0  # to prove the token; the answer comes at once
_POLL_S = 0.05
_MESSAGE_BYTES = 1 << 18  # the names of 4,096 nodes are an eighth of it


class Unreachable(Exception):
    """The rendezvous cannot be reached. The text says why."""


class Connection:
    """One side of a connection between a rank and the rendezvous."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")

    def send(self, message: Message) -> None:
        """Send a message; raises OSError where the other side has closed."""
        self.send_line(json.dumps(message))

    def receive(self, timeout_s: float | None) -> Message:
        """Return the next message; raises OSError (also for the timeout) or ValueError."""
        message: Message = json.loads(self.receive_line(timeout_s))
        return message

    def send_line(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def receive_line(self, timeout_s: float | None) -> str:
        self._socket.settimeout(timeout_s)
        line = self._file.readline(_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection was closed")
        return line[:-1].decode()

    def close(self) -> None:
        """Close the connection; the other side sees its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _proof(token: str, port: int, side: str) -> str:
    """Return what a side shows to prove that it has the token, which itself is never sent.

    It is of one port: what a stranger at another port was shown proves nothing here.
    """
    return hashlib.sha256(f"{side} {port} {token}".encode()).hexdigest()


def connect(addresses: Iterable[str], port: int, token: str, name: Message) -> Connection:
    """Return a connection to the job's rendezvous; raises Unreachable with what is there instead.

    addresses: of the master, not its name, as a slow name server would take seconds for each port.
    name: rank and host of this process.
    """
    why = "no address"
    for address in addresses:
        try:
            rendezvous = Connection(socket.create_connection((address, port), _HELLO_S))
            break
        except OSError as error:
            why = error.strerror or str(error)
    else:
        raise Unreachable(f"port {port}: {why}")
    with contextlib.suppress(OSError, ValueError):
        rendezvous.send_line(_proof(token, port, "rank"))
        rendezvous.send(name)
        if rendezvous.receive_line(_HELLO_S) == _proof(token, port, "rendezvous"):
            return rendezvous
    rendezvous.close()
    raise Unreachable(f"port {port}: another program or another job listens there")


class Rendezvous:
    """Collects one message of each process, stage by stage, and answers all of them at once.

    A message is taken as it is: its sender has proved the token.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        self.connected: list[Message] = []  # the name of each, be it followed by a message or not
        self.hurried = False  # set: wait for no process any longer
        self._messages: dict[str, dict[Connection, Message]] = {FACTS: {}, RESULTS: {}}
        self._members: set[Connection] = set()  # those who are connected now
        threading.Thread(target=self._accept, args=(listener, token), daemon=True).start()

    def _accept(self, listener: socket.socket, token: str) -> None:
        port = listener.getsockname()[1]
        proofs = (_proof(token, port, "rank"), _proof(token, port, "rendezvous"))
        while True:
            member = Connection(listener.accept()[0])
            threading.Thread(target=self._serve, args=(member, *proofs), daemon=True).start()

    def _serve(self, member: Connection, expected: str, own: str) -> None:
        """Serve one connection until it ends, or breaks the rules."""
        with contextlib.suppress(OSError, ValueError):
            if member.receive_line(_HELLO_S) == expected:
                name = member.receive(_HELLO_S)
                self._members.add(member)
                self.connected.append(name)
                member.send_line(own)
                while True:
                    message = member.receive(None)
                    self._messages[message["stage"]][member] = message
        self._members.discard(member)
        member.close()

    def gather(self, stage: str, count: int, timeout_s: float) -> list[Message]:
        """Return the messages of a stage: of `count` processes, or of fewer once the time is over.

        In the later stage, those whose connection has ended are not waited for.
        """
        messages = self._messages[stage]

        def complete() -> bool:
            gone = stage == RESULTS and not self._reporting() - messages.keys()
            return self.hurried or gone or len(messages) >= count

        _until(complete, timeout_s)
        return list(messages.values())

    def _reporting(self) -> set[Connection]:
        return self._messages[FACTS].keys() & self._members

    def answer(self, message: Message) -> None:
        """Send a message to every process that has sent its facts."""
        for member in self._reporting():
            with contextlib.suppress(OSError):
                member.send(message)

    def finish(self, timeout_s: float) -> None:
        """Wait until the others have read their answers and closed."""
        _until(lambda: not self._members, timeout_s)


def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(_POLL_S)


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
    with contextlib.suppress(OSError, ValueError):  # without IPv6
        family = socket.AF_INET6
        return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)


def connect_or_listen(
    join: Callable[[int], Connection], port: int, listens: bool, timeout_s: float
) -> Connection | socket.socket:
    """Return the connection to the job's rendezvous, or a listener where there is none yet.

    listens: whether this process may be the rendezvous: it is on the master's machine and believes
    that it is rank 0, as several may. Raises Unreachable.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            return join(port)
        except Unreachable:
            if time.monotonic() > end:
                raise
        if listens:
            with contextlib.suppress(OSError):  # taken by another of the job's: it can be joined
                return listen(port)
        time.sleep(_POLL_S)
