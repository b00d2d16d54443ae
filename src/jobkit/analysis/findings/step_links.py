"""What communication costs on paper: collectives over links of a latency and a bandwidth.

A message of n bytes over one link takes a + n b (Hockney, Parallel Computing 20, 1994). On p ranks

    ring pass        (p-1) a + (p-1)/p n b         all-gather or reduce-scatter of n bytes in all
    ring all-reduce  a reduce-scatter and an all-gather
                     (Patarasuk and Yuan, JPDC 69, 2009; Thakur et al., IJHPCA 19, 2005)
    tree all-reduce  2 ceil(log2 p) a + 2 n b      up and down, in a pipeline
                     (Sanders, Speck and Traff, Parallel Computing 35, 2009)

Where ranks span nodes, the bandwidth is that of the slower kind of link. Of a ring's hops as many
lie between nodes as there are nodes; a tree has levels inside the nodes, and between them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jobkit.errors import UsageError
from jobkit.metric.comm import Line


@dataclass(frozen=True)
class Link:
    """One kind of link: seconds that a message takes however short it is, and for each byte."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Links:
    """The links inside a node and between nodes; None: not known."""

    intra: Link | None
    inter: Link | None
    # As a collective sees them that was measured on its own: a library may move more bytes for it
    # than its ring would, as Gloo does for a reduce-scatter.
    own: "Mapping[str, Links]" = field(default_factory=dict)

    def of(self, collective: str) -> "Links":
        """The links as this collective sees them."""
        return self.own.get(collective, self)

    def slowest(self, ranks: int, nodes: int) -> float:
        """Seconds for a byte on the slowest kind of link that these ranks use."""
        used = []
        if ranks > nodes:
            used.append(_known(self.intra, "inside a node").s_per_byte)
        if nodes > 1:
            used.append(_known(self.inter, "between nodes").s_per_byte)
        return max(used)

    def latency(self, inside: float, between: float) -> float:
        """Seconds of so many hops inside nodes and between them."""
        total = 0.0
        if inside:
            total += inside * _known(self.intra, "inside a node").latency_s
        if between:
            total += between * _known(self.inter, "between nodes").latency_s
        return total


def _known(link: Link | None, where: str) -> Link:
    if link is None:
        option = "--intra" if where == "inside a node" else "--inter"
        raise UsageError(
            f"the link {where} is not known: measure it with python -m jobkit comm on ranks "
            f"{'of one node' if option == '--intra' else 'of two nodes'}, or say {option}"
        )
    return link


# --- collectives -----------------------------------------------------------------------------


def ring_pass(size: float, ranks: int, nodes: int, links: Links) -> float:
    """Seconds of an all-gather or a reduce-scatter of size bytes in all, around a ring."""
    if ranks == 1:
        return 0.0
    hops = ranks - 1
    between = min(nodes, hops) if nodes > 1 else 0
    share = hops / ranks
    return links.latency(hops - between, between) + share * size * links.slowest(ranks, nodes)


def ring_all_reduce(size: float, ranks: int, nodes: int, links: Links) -> float:
    """Seconds of an all-reduce of size bytes around a ring."""
    return 2 * ring_pass(size, ranks, nodes, links)


def tree_all_reduce(size: float, ranks: int, nodes: int, links: Links) -> float:
    """Seconds of an all-reduce of size bytes up and down a pipelined tree."""
    if ranks == 1:
        return 0.0
    inside, between = math.ceil(math.log2(ranks / nodes)), math.ceil(math.log2(nodes))
    return 2 * (links.latency(inside, between) + size * links.slowest(ranks, nodes))


def fastest_all_reduce(size: float, ranks: int, nodes: int, links: Links) -> float:
    """The faster of ring and tree: a library that chooses well."""
    return min(f(size, ranks, nodes, links) for f in (ring_all_reduce, tree_all_reduce))


ALGORITHMS: dict[str, Callable[[float, int, int, Links], float]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "fastest": fastest_all_reduce,
}


@dataclass(frozen=True)
class Message:
    """A collective that a step calls count times, of so many bytes each time."""

    collective: str  # all_reduce, all_gather or reduce_scatter
    bytes: float
    count: int = 1


def communication_s(
    messages: Sequence[Message], ranks: int, nodes: int, links: Links, algorithm: str = "ring"
) -> float:
    """Seconds of all collectives of a step, one after the other; algorithm: of the all-reduces."""
    total = 0.0
    for one in messages:
        how = ALGORITHMS[algorithm] if one.collective == "all_reduce" else ring_pass
        total += one.count * how(one.bytes, ranks, nodes, links.of(one.collective))
    return total


# --- links that were measured ----------------------------------------------------------------


_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # around the ring


def links_of(lines: Sequence[Line]) -> Links:
    """The links that the communication benchmark measured.

    From its all_reduce, by the ring's formula, where all its ranks were on one node, or each on
    one of its own: then the sums that a reduction makes are in it, too. Else from sendrecv.
    all_gather and reduce_scatter see the links as they themselves measured them, where they did.
    """
    found: dict[str, dict[str, Link]] = {name: {} for name in ("sendrecv", *_PASSES)}
    for one in lines:
        if one.operation == "sendrecv":
            found["sendrecv"].setdefault(one.scope, Link(one.latency_s, one.s_per_byte))
        elif one.operation in _PASSES and one.ranks > 1 and one.nodes in (1, one.ranks):
            hops = _PASSES[one.operation] * (one.ranks - 1)
            link = Link(one.latency_s / hops, one.s_per_byte * one.ranks / hops)
            found[one.operation]["intra_node" if one.nodes == 1 else "inter_node"] = link
    base = {**found.pop("sendrecv"), **found.pop("all_reduce")}
    own = {name: _links({**base, **links}) for name, links in found.items() if links}
    return replace(_links(base), own=own)


def _links(found: Mapping[str, Link]) -> Links:
    return Links(found.get("intra_node"), found.get("inter_node"))
