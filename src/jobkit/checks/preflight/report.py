"""The report of a preflight: the results of its checks, and how ranks and nodes are written."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jobkit.errors import Exit

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

    def note(self, text: str) -> None:
        """Add what may slow a training down, or end a large one."""
        self.notes.append(f"{self.check}: {text}")


@dataclass(frozen=True)
class Report:
    """The result of a preflight."""

    facts: Sequence[Facts]
    results: Sequence[CheckResult]
    took_s: float

    @property
    def code(self) -> int:
        """The exit code of the step."""
        return Exit.PREFLIGHT if any(result.faults for result in self.results) else Exit.OK

    def lines(self) -> list[str]:
        """The lines for people: one per check, and one per fault."""
        lines = []
        for result in self.results:
            lines += [f"[preflight] FAULT {fault}" for fault in result.faults]
            if result.text and not result.faults:
                lines.append(f"[preflight] ok {result.check}: {result.text}")
            lines += [f"[preflight] note {note}" for note in result.notes]
        count = sum(len(result.faults) for result in self.results)
        end = counted(count, "fault") if count else "all checks passed"
        return [*lines, f"[preflight] {end} ({self.took_s:.1f} s)"]

    def to_json(self) -> dict[str, Any]:
        """The same for programs, with the facts themselves."""
        return {
            "ok": self.code == Exit.OK,
            "exit_code": int(self.code),
            "took_s": self.took_s,
            "faults": [asdict(fault) for result in self.results for fault in result.faults],
            "checks": [
                {"check": r.check, "ok": not r.faults, "measured": r.text, "notes": r.notes}
                for r in self.results
            ],
            "ranks": list(self.facts),
        }


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in short: 0-3,6."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def named_ranks(ranks: Iterable[int]) -> str:
    """Ranks with their word: rank 4, ranks 0-3."""
    numbers = set(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def counted(count: int, word: str) -> str:
    """A count with its word: 1 rank, 4 ranks."""
    return f"{count} {word}{'s' * (count != 1)}"


def where(facts: Sequence[Facts]) -> str:
    """The ranks and nodes of some facts in short: ranks 0-3 on n1, rank 4 on n2."""
    hosts = by_host(facts)
    texts = [f"{named_ranks(f['rank'] for f in hosts[name])} on {name}" for name in [*hosts][:8]]
    return ", ".join(texts) + (f" and {len(hosts) - 8} more nodes" if len(hosts) > 8 else "")


def by_host(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    """The facts of each node."""
    hosts: dict[str, list[Facts]] = defaultdict(list)
    for fact in facts:
        hosts[fact["host"]].append(fact)
    return hosts


def grouped(facts: Sequence[Facts], key: Callable[[Facts], Any]) -> dict[Any, list[Facts]]:
    """The facts by a value that they share; those with an empty one are left out."""
    groups: dict[Any, list[Facts]] = defaultdict(list)
    for fact in facts:
        if value := key(fact):
            groups[value].append(fact)
    return groups
