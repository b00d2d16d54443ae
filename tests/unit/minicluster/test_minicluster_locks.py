"""Two commands at once never meet: locks by folder, and blocks of ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from minicluster import locks
from minicluster.errors import ClusterError
from minicluster.layout import PORTS_PER_BLOCK, Layout

HERE = Layout(Path("/tmp/jobkit-test-locks"))


def listen(port: int) -> socket.socket:
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", port))
    taken.listen()
    return taken


def test_a_block_with_a_taken_port_is_passed_over() -> None:
    with locks.port_block(HERE, 4, None) as first:
        pass
    with listen(first.slurmd(4)), locks.port_block(HERE, 4, None) as second:
        assert second.base != first.base
    with listen(first.slurmd(5)), locks.port_block(HERE, 4, None) as third:
        assert third.base == first.base  # four nodes do not use the fifth's port


def test_two_at_once_get_different_blocks() -> None:
    with locks.port_block(HERE, 4, None) as first, locks.port_block(HERE, 4, None) as second:
        assert abs(first.base - second.base) >= PORTS_PER_BLOCK
    with locks.port_block(HERE, 4, None) as again:
        assert again.base == first.base


def test_many_nodes_take_several_blocks() -> None:
    with (
        locks.port_block(HERE, 256, None) as wide,
        pytest.raises(ClusterError, match="another `up` is taking it"),
        locks.port_block(HERE, 4, wide.base + 2 * PORTS_PER_BLOCK),
    ):
        pass


def test_a_chosen_block_that_is_taken_is_an_error() -> None:
    with locks.port_block(HERE, 4, None) as found:
        free = found
    says = f"port {free.mariadb} of its block is in use"
    with (
        listen(free.mariadb),
        pytest.raises(ClusterError, match=says),
        locks.port_block(HERE, 4, free.base),
    ):
        pass
    with locks.port_block(HERE, 4, free.base) as chosen:
        assert chosen == free


def test_a_folder_is_locked_for_one() -> None:
    with (
        locks.held(locks.folder_name(HERE), ""),
        pytest.raises(ClusterError, match="wait for it"),
        locks.held(locks.folder_name(HERE), "wait for it"),
    ):
        pass
    with locks.held(locks.folder_name(HERE), "it is free again"):
        pass
