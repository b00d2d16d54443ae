"""The messages of a training step, and the time that they take over links.

A message of n bytes over one link takes latency + n x seconds per byte (Hockney, Parallel
Computing 20, 1994). A collective goes around a ring of p ranks (Patarasuk and Yuan, JPDC 69, 2009;
Thakur et al., IJHPCA 19, 2005):

    all-gather or reduce-scatter of n bytes in all    (p-1) latency + (p-1)/p n seconds per byte
    all-reduce                                        both of them, one after the other

Where the ranks span nodes, the bandwidth is that of the slower kind of link, and of a pass's hops
as many lie between nodes as there are nodes. What each strategy sends is in strategies.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jobkit.errors import UsageError
from jobkit.units import bus_factor, passes


@dataclass(frozen=True)
class Link:
    """One kind of link: seconds that any message takes, and those of each byte."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Links:
    """The links inside a node and between nodes; None: not known."""

    intra: Link | None
    inter: Link | None


@dataclass(frozen=True)
class Scope:
    """The ranks that take part in one message."""

    ranks: int
    nodes: int = 1  # that they are on
    per_node: int = 1  # groups like this one that use a node's network at once


@dataclass(frozen=True)
class Message:
    """An operation of a step: bytes as metric.comm.OPERATIONS counts them, count times."""

    operation: str
    bytes: float
    scope: Scope
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What of a model decides the traffic, in bytes of fp32."""

    parameters: int
    # Of each of FSDP's shard groups, and of those that stay gathered for the backward pass. Both
    # empty: not known, and all count as one group.
    shard_groups: tuple[float, ...] = ()
    kept_groups: tuple[float, ...] = ()
    # Of a pipeline: one microbatch's activations at the busiest stage boundary (None: not known),
    # microbatches in a step, and the gradients of the rank that has most.
    boundary: float | None = None
    microbatches: int = 1
    stage: int = 0


def scope_of(ranks: int, ranks_per_node: int, stride: int = 1) -> Scope:
    """The scope of ranks that lie `stride` apart; ranks of a node follow each other."""
    nodes = min(ranks, -(-ranks * stride // ranks_per_node))
    return Scope(ranks, nodes, min(stride, ranks_per_node) if nodes > 1 else 1)


def seconds(messages: Iterable[Message], links: Links) -> float:
    """Seconds of all messages of a step, one after the other."""
    return sum(m.count * message_s(m, links) for m in messages)


def message_s(message: Message, links: Links) -> float:
    """Seconds of one message by the ring's formula. Raises UsageError for a link not known."""
    scope = message.scope
    if scope.ranks == 1:
        return 0.0
    hops = scope.ranks - 1
    between = min(scope.nodes, hops) if scope.nodes > 1 else 0
    latency, per_byte = 0.0, 0.0
    if scope.ranks > scope.nodes:
        intra = _known(links.intra, "inside a node", "of one node")
        latency, per_byte = (hops - between) * intra.latency_s, intra.s_per_byte
    if scope.nodes > 1:
        inter = _known(links.inter, "between nodes", "of two nodes")
        latency += between * inter.latency_s
        per_byte = max(per_byte, inter.s_per_byte * scope.per_node)
    carried = bus_factor(message.operation, scope.ranks) * message.bytes
    return passes(message.operation) * latency + carried * per_byte


def _known(link: Link | None, where: str, ranks: str) -> Link:
    if link is None:
        measure = f"measure it with `python -m jobkit comm` on ranks {ranks}"
        raise UsageError(f"the link {where} is not known: {measure}")
    return link
