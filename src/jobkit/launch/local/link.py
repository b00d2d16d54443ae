"""Messages between the nodes of a run without Slurm: lines of JSON over TCP."""

import contextlib
import errno
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from jobkit.errors import NotStarted, UsageError

Message = dict[str, Any]
_POLL_S = 0.1
_LONGEST = 10_000  # bytes of a line; what is longer comes from another program
_SIOCGIFADDR = 0x8915  # linux/sockios.h
# A machine that is switched off says nothing: it is asked after 10 s, and lost after 30 s.
_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Link:
    """A connection to another node."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self.ended, self._kept = connected, False, b""
        self._messages = list[Message]()
        connected.setblocking(True)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def gone(self) -> bool:
        """Whether the other node has closed the connection, without having said more before."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def own_address(self) -> str:
        """This machine's address on the connection."""
        return str(self.socket.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send a message; nothing where the other node has gone, which reading will notice."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> None:
        """Wait for bytes, and keep the messages in them."""
        try:
            block = self.socket.recv(1 << 16)
        except OSError:
            block = b""
        *lines, self._kept = (self._kept + block).split(b"\n")
        self.ended = not block or len(self._kept) > _LONGEST
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.ended = True  # no node speaks so
                return
            self._messages.append(message)

    def take(self) -> Iterator[Message]:
        """The messages that have come."""
        while self._messages:
            yield self._messages.pop(0)

    def first(self) -> Message:
        """The next message, waited for; an empty one where none comes."""
        while not self._messages and not self.ended:
            self.receive()
        return self._messages.pop(0) if self._messages else {}

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Node 0's socket; UsageError where the address is not this machine's, or the port is taken."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        code = error.errno if isinstance(error, OSError) else None
        if code == errno.EADDRINUSE:
            raise UsageError(f"port {port} is in use: choose another with --master-port") from None
        if code == errno.EADDRNOTAVAIL:
            hint = "node 0 is the machine that --master-addr names"
            raise UsageError(f"{host} is not an address of this machine: {hint}") from None
        raise UsageError(f"--master-addr {host}, --master-port {port}: {error}") from None
    return listener


def meet(
    listener: socket.socket, own: Message, until: float, enough: Callable[[], bool]
) -> dict[int, Link]:
    """Node 0: the links to all other nodes, which say the same size. Fewer if `enough` says so.

    Raises NotStarted where one does not come in time, UsageError where it has another size.
    """
    found = dict[int, Link]()
    listener.settimeout(_POLL_S)
    while len(found) < own["nodes"] - 1 and not enough():
        if time.monotonic() > until:
            left = sorted(set(range(1, own["nodes"])) - set(found))
            raise NotStarted(
                f"node {', '.join(map(str, left))} of {own['nodes']} did not come: start run.sh "
                "on every machine within --start-timeout seconds"
            )
        with contextlib.suppress(TimeoutError):
            link = Link(listener.accept()[0])
            link.socket.settimeout(2.0)
            hello = link.first()
            link.socket.settimeout(None)
            fault = _fault(hello, own, {n: each for n, each in found.items() if not each.gone})
            link.send({"refused": fault} if fault else {"welcome": True})
            if fault is None:
                if before := found.pop(hello["node"], None):  # a pod that was started again
                    before.close()
                found[hello["node"]] = link
                continue
            link.close()
            if hello:
                raise UsageError(fault)
    return found


def _fault(hello: Message, own: Message, found: dict[int, Link]) -> str | None:
    """What is wrong with a node that has come; None where nothing is."""
    node = hello.get("node")
    if not isinstance(node, int):
        return "not a node of a run"
    if hello.get("nodes") != own["nodes"]:
        return f"node {node} was told --nnodes {hello.get('nodes')}, and node 0 {own['nodes']}"
    if hello.get("ranks") != own["ranks"]:
        ranks = f"{hello.get('ranks')} rank(s), and node 0 {own['ranks']}"
        return f"node {node} starts {ranks}: give the same --nproc-per-node on every machine"
    if node in found or not 0 < node < own["nodes"]:
        return f"--node-rank {node} was given twice: each machine has its own, from 0"
    return None


def connect(host: str, port: int, own: Message, until: float, enough: Callable[[], bool]) -> Link:
    """The link to node 0, which may not have started yet; NotStarted where it does not come."""
    while not enough():
        try:
            link = Link(socket.create_connection((host, port), timeout=5))
        except (OSError, OverflowError) as error:
            if time.monotonic() > until or isinstance(error, OverflowError):
                raise NotStarted(f"node 0 does not answer at {host}:{port}: {error}") from None
            time.sleep(_POLL_S)
            continue
        # Another program may say nothing.
        link.socket.settimeout(max(until - time.monotonic(), 1.0))
        link.send(own)
        answer = link.first()
        link.socket.settimeout(None)
        if "welcome" in answer:
            return link
        link.close()
        raise UsageError(str(answer.get("refused", f"no node of a run is at {host}:{port}")))
    return Link(socket.socket())


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where it cannot be told."""
    if address.startswith("127."):
        return "lo"
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = struct.pack("256s", name.encode()[:15])
                    answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
                    if socket.inet_ntoa(answer[20:24]) == address:
                        return name
    except (OSError, ImportError):
        pass
    return None
