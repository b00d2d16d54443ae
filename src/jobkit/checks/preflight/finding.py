"""The result of one check of a preflight, and how ranks, nodes and counts are written in it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]


@dataclass(frozen=True)
class CheckFault:
    """One thing that is wrong."""

    check: str
    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.what}; fix: {self.fix}"


@dataclass
class CheckResult:
    """What one check measured, and what is wrong."""

    check: str
    text: str = ""  # what was measured
    faults: list[CheckFault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fault(self, where: str, what: str, fix: str) -> None:
        """Add a fault of this check."""
        self.faults.append(CheckFault(self.check, where, what, fix))


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in short: 0-3,6."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ranks with their word: rank 4, ranks 0-3."""
    numbers = set(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def many(count: int, word: str) -> str:
    """Return a count with its word: 1 rank, 4 ranks."""
    return f"{count} {word}{'s' * (count != 1)}"


def where(facts: Sequence[Facts]) -> str:
    """Return the ranks and nodes of some facts in short: ranks 0-3 on n1, rank 4 on n2."""
    texts = []
    hosts = by_host(facts)
    for name in list(hosts)[:8]:
        ranks = [f["rank"] for f in hosts[name]]
        texts.append(f"{named_ranks(ranks)} on {name}")
    return ", ".join(texts) + (f" and {len(hosts) - 8} more nodes" if len(hosts) > 8 else "")


def by_host(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Return the facts of each node."""
    hosts: dict[str, list[Facts]] = defaultdict(list)
    for one in facts:
        hosts[one["host"]].append(one)
    return hosts


def grouped(facts: Sequence[Facts], key: Callable[[Facts], Any]) -> dict[Any, list[Facts]]:
    """Return the facts by a value that they share; those with an empty one are left out."""
    groups: dict[Any, list[Facts]] = defaultdict(list)
    for one in facts:
        if value := key(one):
            groups[value].append(one)
    return groups
