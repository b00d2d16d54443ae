"""The messages between the nodes of a run: who is let in, and who says nothing."""

import json
import socket
import time

import pytest

from jobkit.errors import UsageError
from jobkit.launch.local import link


def _join(port: int, node: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.sendall(json.dumps({"node": node, "nodes": 3, "ranks": 1}).encode() + b"\n")
    return made


def test_a_node_that_was_started_again_takes_its_place_again() -> None:
    with link.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        _join(port, 1).close()
        others = [_join(port, 1), _join(port, 2)]
        own = {"node": 0, "nodes": 3, "ranks": 1}
        found = link.meet(listener, own, time.monotonic() + 300, lambda: False)
    assert {n: each.socket.getpeername() for n, each in found.items()} == {
        n: other.getsockname() for n, other in enumerate(others, 1)
    }
    for each in others:
        each.close()
    for joined in found.values():
        joined.close()


def test_a_node_rank_given_twice_is_refused() -> None:
    with link.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        others = [_join(port, 1), _join(port, 1)]
        own = {"node": 0, "nodes": 3, "ranks": 1}
        with pytest.raises(UsageError, match="given twice"):
            link.meet(listener, own, time.monotonic() + 300, lambda: False)
    for each in others:
        each.close()


def test_a_program_that_says_nothing_is_no_node_0() -> None:
    with link.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match="no node of a run"):
            link.connect("127.0.0.1", port, {"node": 1}, time.monotonic(), lambda: False)
