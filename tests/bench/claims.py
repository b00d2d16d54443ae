"""How often check-claims is wrong, on published scaling tables.

A false alarm is a right claim that is said not to follow; a miss is a wrong one that is said to
follow. Right is what values that are rounded, or cut, to the printed ones can give. Of the
published tables (published_claims.md) every second one was held out while the command was written.

    python tests/bench/claims.py                 the first half
    python tests/bench/claims.py --held-out      the other half
"""

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench import ROOT, report

sys.path[:0] = [str(ROOT / "src")]
from jobkit.analysis.claims import check  # noqa: E402

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
        answers = told.get((line, _digits(said)), [])
        if answers:
            made[f"{'wrong' if wrong else 'right'} {answers.pop(0)}"] += 1
        else:
            made["wrong unread" if wrong else "unread"] += 1
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--held-out", action="store_true")
    counts = Counter[str]()
    for document in published(parser.parse_args().held_out):
        counts += judge(document)
    right, wrong = (counts[f"{kind} True"] + counts[f"{kind} False"] for kind in ("right", "wrong"))
    unsure = counts["right None"] + counts["wrong None"] + counts["wrong unread"]
    return report(
        {
            "right claims": right,
            "false alarms": counts["right False"],
            "wrong claims": wrong,
            "missed": counts["wrong True"],
            "not judged": unsure,
        },
        at_most={"false alarms": 0, "missed": 0},
    )


if __name__ == "__main__":
    sys.exit(main())
