"""What a step sends, and how long that takes over the links that jobkit comm measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import Size
from jobkit.errors import UsageError
from jobkit.metric.comm import Line, read_lines
from jobkit.spec.runspec import SETTINGS
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import Link, Links, Message, ModelSize, seconds
from jobkit.units import bus_factor, passes

_FP32 = 4  # bytes
_RINGS = ("all_reduce", "all_gather", "reduce_scatter")


def read_links(paths: Sequence[Path]) -> Links:
    """The links in one comm.json or several; raises UsageError for a file that is none."""
    return links_of([line for path in paths for line in read_lines(path)])


def links_of(lines: Sequence[Line]) -> Links:
    """The links inside a node and between nodes, from the lines of a comm.json.

    From its all_reduce, by the ring's formula, where all its ranks were on one node, or each on
    one of its own: then the sums that a reduction makes are included. Else from sendrecv.
    all_gather and reduce_scatter see the links as they themselves measured them, where they did.
    Of several measurements the one on most ranks counts for sizes that were not measured.
    """
    lines = sorted(lines, key=lambda line: line.ranks)
    whole = {
        (line.operation, line.ranks, line.nodes): Link(line.latency_s, line.s_per_byte)
        for line in lines
        if line.operation in _RINGS and line.scope == "all"
    }
    links: dict[str, dict[str, Link]] = {name: {} for name in ("sendrecv", *_RINGS)}
    for line in lines:
        if line.operation == "sendrecv":
            links["sendrecv"].setdefault(line.scope, Link(line.latency_s, line.s_per_byte))
        elif line.operation in _RINGS and line.ranks > 1 and line.nodes in (1, line.ranks):
            hops = passes(line.operation) * (line.ranks - 1)
            factor = bus_factor(line.operation, line.ranks)
            link = Link(line.latency_s / hops, line.s_per_byte / factor)
            links[line.operation]["intra_node" if line.nodes == 1 else "inter_node"] = link
    base = {**links.pop("sendrecv"), **links.pop("all_reduce")}
    own = {name: _links({**base, **of}) for name, of in links.items() if of}
    return replace(_links(base), own=own, whole=whole)


def _links(known: Mapping[str, Link]) -> Links:
    return Links(known.get("intra_node"), known.get("inter_node"))


def messages(run: Mapping[str, Any]) -> list[Message]:
    """The messages of one optimizer step. run: its settings, parameters and shard_groups.

    FSDP's shard groups count as equal in size; where their number was not recorded, as one. Raises
    UsageError for what does not follow from the settings.
    """
    settings = {name: run.get(name) for name in SETTINGS}
    facts, parameters = FACTS.get(str(settings["strategy"])), run.get("parameters")
    if not parameters:
        raise UsageError("the logs do not say the parameters of the model")
    groups, size = int(run.get("shard_groups") or 0), ModelSize(parameters=int(parameters) * _FP32)
    if groups:  # the last one stays gathered
        each = size.parameters / groups
        size = replace(size, shard_groups=(each,) * (groups - 1), kept_groups=(each,))
    try:
        sent = facts.messages(settings, size) if facts and facts.is_modelled(settings) else None
    except (KeyError, TypeError):
        raise UsageError("the logs do not say every setting that decides the traffic") from None
    if sent is None:
        raise UsageError("what it sends is known of ddp (without PowerSGD) and fsdp alone")
    return sent


def sent_share(
    results: Results, curve: Sequence[Size], links: Links, per_node: int | None, last: int
) -> Callable[[float], float]:
    """The time of a step's messages at a size, over the time of a step at the smallest one.

    last: the largest size that is asked for. Raises UsageError where it is not known.
    """
    first, run_id = curve[0], curve[0].ok_runs[0]
    settings = {**results.settings(run_id), **results.rows[run_id]}
    places = {s.world_size: (s.nodes or 1, s.ranks_per_node or 1) for s in curve}
    if not first.global_batch_size or not first.throughput:
        raise UsageError("the logs do not say the batch of every size")
    step_s = first.global_batch_size / first.throughput

    def share(ranks: float) -> float:
        n = max(1, round(ranks))
        full = min(per_node or n, n)
        nodes, each = places.get(n) or (-(-n // full), full)
        place = {"nodes": nodes, "ranks_per_node": each, "world_size": n}
        return seconds(messages(settings | place), links) / step_s

    for n in (*(s.world_size or 1 for s in curve), last):
        share(n)
    return share
