"""The links that the communication benchmark measured, for the step model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jobkit.metric.comm import Line
from jobkit.spec.traffic import Link, Links
from jobkit.units import bus_factor, passes

_RINGS = ("all_reduce", "all_gather", "reduce_scatter")


def links_of(lines: Sequence[Line]) -> Links:
    """The links inside a node and between nodes, from the lines of a comm.json.

    From its all_reduce, by the ring's formula, where all its ranks were on one node, or each on
    one of its own: then the sums that a reduction makes are included. Else from sendrecv.
    all_gather and reduce_scatter see the links as they themselves measured them, where they did.
    Of several measurements the one on most ranks counts for sizes that were not measured.
    """
    lines = sorted(lines, key=lambda one: one.ranks)
    whole = {
        (one.operation, one.ranks, one.nodes): Link(one.latency_s, one.s_per_byte)
        for one in lines
        if one.operation in _RINGS and one.scope == "all"
    }
    found: dict[str, dict[str, Link]] = {name: {} for name in ("sendrecv", *_RINGS)}
    for one in lines:
        if one.operation == "sendrecv":
            found["sendrecv"].setdefault(one.scope, Link(one.latency_s, one.s_per_byte))
        elif one.operation in _RINGS and one.ranks > 1 and one.nodes in (1, one.ranks):
            hops = passes(one.operation) * (one.ranks - 1)
            factor = bus_factor(one.operation, one.ranks)
            link = Link(one.latency_s / hops, one.s_per_byte / factor)
            found[one.operation]["intra_node" if one.nodes == 1 else "inter_node"] = link
    base = {**found.pop("sendrecv"), **found.pop("all_reduce")}
    own = {name: _links({**base, **links}) for name, links in found.items() if links}
    return replace(_links(base), own=own, whole=whole)


def _links(found: Mapping[str, Link]) -> Links:
    return Links(found.get("intra_node"), found.get("inter_node"))
