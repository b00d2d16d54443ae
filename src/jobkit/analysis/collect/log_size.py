"""The size of a run whose log exists already: found by an expression, or recorded in the log."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regex

from jobkit.analysis.collect.lines import TIMEOUT_S
from jobkit.analysis.tables.frames import Row
from jobkit.errors import UsageError
from jobkit.metric.kinds import Record
from jobkit.outcome.logs import open_log
from jobkit.spec.runspec import RunSpec

_HEAD = 1 << 20  # bytes of a log in which its size is looked for


def recorded_size(start: Record, spec: RunSpec | None, per_node: int | None) -> Row:
    """The size that jobkit's own lines say; empty where there are none."""
    known = {"nodes": spec.nodes, "ranks_per_node": spec.ranks_per_node} if spec else {}
    ranks = start.get("world_size")
    return _shape({**known, "ranks": ranks}, per_node) if type(ranks) is int and ranks > 0 else {}


def size_of(path: Path, size: str, per_node: int | None) -> Row:
    """The size of a run: from the name of its log, else from its first MiB; empty if in neither.

    size: the expression; its series is told too. Raises UsageError where it takes too long.
    """
    expression = regex.compile(size)
    try:
        with open_log(path, Path("/")) as stream:
            head = stream.read(_HEAD).decode("utf-8", "replace")
        texts = [path.name, *head.splitlines()]
        found = next((m for t in texts if (m := expression.search(t, timeout=TIMEOUT_S))), None)
    except OSError:
        return {}
    except TimeoutError:
        raise UsageError(f"--size {size!r}: took longer than {TIMEOUT_S:g} s") from None
    if found is None:
        return {}
    named = {k: v for k, v in found.groupdict().items() if v}
    series = {"series": named.pop("series")} if "series" in named else {}
    numbers = {k: int(v) for k, v in named.items() if v.isdecimal()}
    if (plain := plain_group(expression)) and (found[plain] or "").isdecimal():
        numbers.setdefault("nodes" if per_node else "ranks", int(found[plain]))
    return {**series, **_shape(numbers, per_node)}


def plain_group(expression: Any) -> int | None:
    """The first group that has no name; none where another one than series has."""
    names = expression.groupindex
    free = [n for n in range(1, expression.groups + 1) if n not in names.values()]
    return free[0] if free and not names.keys() - {"series"} else None


def _shape(numbers: Mapping[str, int], per_node: int | None) -> Row:
    """Nodes, ranks per node and ranks from those of them that are known; 1 node where none is.

    per_node: of a full node, where the numbers do not say it.
    """
    nodes, ranks = numbers.get("nodes"), numbers.get("ranks")
    each = numbers.get("ranks_per_node")
    if not each and per_node and bool(nodes) != bool(ranks):
        each = min(per_node, ranks or per_node)
    ranks = ranks or ((nodes or 1) * each if each else None)
    if not ranks:
        return {}
    nodes = nodes or (-(-ranks // each) if each else 1)
    return {"nodes": nodes, "ranks_per_node": each or -(-ranks // nodes), "world_size": ranks}
