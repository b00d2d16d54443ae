"""How often check-claims is wrong, on published scaling tables.

A false alarm is a right claim that is said not to follow; a miss is a wrong one that is said to
follow. Right is what values that are rounded, or cut, to the printed ones can give. Of the
published tables (published_claims.md) every second one was held out while the command was written.

    python tests/bench/claims.py
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench import Figures, report
from jobkit.checks.claims import check

PUBLISHED = Path(__file__).with_name("published_claims.md")
Mark = tuple[int, str, bool]  # line, claim as written, whether it is wrong
Document = tuple[str, list[Mark]]


def published(held_out: bool) -> Iterator[Document]:
    """One half of the published tables, with their marks."""
    sections = PUBLISHED.read_text(encoding="utf-8").split("\n## ")[1:]
    for section in sections[int(held_out) :: 2]:
        lines = section.splitlines()
        wrong = {tuple(map(int, w.split(":"))) for w in re.findall(r"\d+:\d+", lines[2])}
        marks = []
        for i, line in enumerate(lines[6:], 1):
            for j, cell in enumerate(line.strip("| ").split(" | "), 1):
                if found := re.search(r"\d[\d.]*", cell):
                    marks.append((6 + i, found[0], (i, j) in wrong))
        yield "\n".join(lines), marks


def _digits(text: str) -> str:
    found = re.search(r"\d[\d.]*", text.replace(",", "."))
    return found[0] if found else text


def judge(document: Document) -> Counter[str]:
    """How the claims of one document were judged."""
    text, marks = document
    told: dict[tuple[int, str], list[bool | None]] = defaultdict(list)
    for verdict in check(text):
        said = _digits(verdict.said)
        told[verdict.line, said].append(verdict.follows)
    made: Counter[str] = Counter()
    for line, said, wrong in marks:
        if answers := told[line, _digits(said)]:
            made[f"{'wrong' if wrong else 'right'} {answers.pop(0)}"] += 1
    return made


def main() -> int:
    figures, limits = Figures(), Figures()
    for half, held_out in (("", False), (", held out", True)):
        counts = sum(map(judge, published(held_out)), Counter[str]())
        for kind, follows, mistake in (("right", False, "false alarms"), ("wrong", True, "missed")):
            figures[f"{kind} claims{half}"] = counts[f"{kind} True"] + counts[f"{kind} False"]
            figures[mistake + half], limits[mistake + half] = counts[f"{kind} {follows}"], 0
    return report(figures, at_most=limits)


if __name__ == "__main__":
    sys.exit(main())
