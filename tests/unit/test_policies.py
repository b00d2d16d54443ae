"""What the project asks of its own words: the field's terms, short lines, names of test files."""

import itertools
import re

from support.place import ROOT

# Private words, and the standard terms that stand in their place.
BANNED = {
    r"foret(old|ells?)": "predicted",
    r"fullest": "maximum over ranks",
    r"the truth\b": "reference",
    r"hopeful": "optimistic",
    r"on paper": "step-time model",
    r"\bwish(es|ed)?\b": "request",
    r"\bdesk\b": "rendezvous",
    r"\bkeeper\b": "checkpoint manager",
    r"\banew\b": "from scratch",
    r"\bstruck\b|\bstrikes?\b": "injected, hit",
    r"\bbrothers?\b": "another process",
    r"\bfor ever\b": "forever",
    r"\bruins?\b": "idempotent",
    r"holds? still": "pauses",
    r"plant(s|ed)? (a )?faults?": "inject faults",
    r"one a (GPU|rank|node)": "one per GPU",
    r"(images|samples|bytes|bits) a second": "per second",
    r"cannot run so": "not applicable",
    r"left no word|no word of its end": "no run_end record",
    r"\btwins?\b": "communication-free replica",
    r"bad day": "inject failures",
    r"tagged places": "[METRIC] lines",
    r"Slurm's word": "Slurm state",
    r"of another training": "of a different configuration",
    r"an? rank of its own": "one rank",
    r"stands in .*:\d": "is in",
    r"the three doors|## Rooms": "entry points, parts",
    r"account that pays": "account to charge",
    r"nodes come whole": "whole nodes are allocated",
    r"micro-batch(es)? per|order of the micro-batches": "microbatch",
    r"one a line|a word each": "one per line",
    r"(starts?|requeues?|started|requeue it|start it again) so often": "at most N times",
    r"training goes on|jobs go on": "continues",
    r"Options of its own": "Options of run.sh",
    r"use only so much": "use only this part",
    r"somebody's scaling table": "a published scaling table",
    r"what became of": "state, result",
    r"were survived": "recovered",
}
TEXTS = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.j2")),
    *(p for p in sorted((ROOT / "hpc").rglob("*")) if p.is_file()),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "run.sh", "edf.toml", "Makefile")),
    *(ROOT / f"{n}" for n in ("run_benchmarks.py", "collect_results.py", "plot_results.py")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


DOCS = [path for path in TEXTS if path.suffix == ".md"]


def prose(text: str) -> str:
    """A page without its code blocks, comments and generated tables."""
    text = re.sub(r"<!-- generated.*?<!-- end -->|^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def test_words_and_lines() -> None:
    any_word = re.compile("|".join(BANNED), re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}, say {instead!r}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any_word.search(line)
        for word, instead in BANNED.items()
        if (match := re.search(word, line, re.IGNORECASE))
    ]
    for page in DOCS:
        long = (x for x in prose(page.read_text()).splitlines() if len(x) > 100 and x[0] != "|")
        found += [f"{page.name}: longer than 100: {line}" for line in long]
    if (lines := len((ROOT / "README.md").read_text().splitlines())) > 220:
        found.append(f"README.md is an overview: {lines} lines")
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    # pytest would not collect the second one.
    found += [f"two files {n}" for n, after in itertools.pairwise(names) if n == after]
    assert found == []
