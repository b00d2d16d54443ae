"""The time of messages over links, by the ring's formulas."""

import pytest

from jobkit.errors import UsageError
from jobkit.spec.traffic import Link, Links, Message, Scope, message_s, scope_of, seconds

FAST, SLOW = Link(1e-6, 1e-9), Link(10e-6, 4e-9)
LINKS = Links(FAST, SLOW)


def test_a_pass_around_the_ring() -> None:
    for ranks, nodes, expected in [
        (1, 1, 0.0),
        (2, 1, 1e-6 + 1e6 / 2 * 1e-9),
        (4, 1, 3e-6 + 1e6 * 3 / 4 * 1e-9),
        (4, 2, 1e-6 + 20e-6 + 1e6 * 3 / 4 * 4e-9),  # of three hops two between nodes
        (2, 2, 10e-6 + 1e6 / 2 * 4e-9),
        (8, 2, 5e-6 + 20e-6 + 1e6 * 7 / 8 * 4e-9),
    ]:
        scope = Scope(ranks, nodes)
        for operation, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
            found = message_s(Message(operation, 1e6, scope), LINKS)
            assert found == pytest.approx(passes * expected)

    for operation in ("sendrecv", "broadcast"):  # each link carries all of the bytes
        found = [message_s(Message(operation, 1e6, Scope(2, nodes)), LINKS) for nodes in (1, 2)]
        assert found == pytest.approx([1e-6 + 1e-3, 10e-6 + 4e-3])


def test_messages_add_up_with_their_latencies() -> None:
    one, eight = Message("all_gather", 2e6, Scope(4)), Message("all_gather", 2e6 / 8, Scope(4), 8)
    assert seconds([one, eight], LINKS) == pytest.approx(2 * message_s(one, LINKS) + 7 * 3e-6)


def test_groups_that_use_a_nodes_network_at_once_share_it() -> None:
    scope = scope_of(2, ranks_per_node=4, stride=4)
    assert scope == Scope(2, 2, 4)
    alone, shared = (Message("all_reduce", 1e6, s) for s in (Scope(2, 2), scope))
    free = Links(None, Link(0.0, 4e-9))
    assert message_s(shared, free) == pytest.approx(4 * message_s(alone, free))


def test_the_nodes_of_a_scope() -> None:
    for given, expected in (
        ((8, 4, 1), Scope(8, 2)),
        ((4, 4, 1), Scope(4, 1)),
        ((3, 1, 1), Scope(3, 3)),
        ((2, 8, 4), Scope(2, 1)),  # two replicas on one node
        ((4, 4, 2), Scope(4, 2, 2)),
        ((2, 2, 4), Scope(2, 2, 2)),  # replicas of two nodes each
    ):
        assert scope_of(*given) == expected


def test_a_link_that_is_not_known_is_asked_for() -> None:
    for links, scope, text in (
        (Links(FAST, None), Scope(4, 2), "between nodes is not known.*of two nodes"),
        (Links(None, SLOW), Scope(4, 2), "inside a node is not known.*of one node"),
        (Links(None, SLOW), Scope(2, 1), "inside a node is not known"),
    ):
        with pytest.raises(UsageError, match=text):
            message_s(Message("all_gather", 1.0, scope), links)
