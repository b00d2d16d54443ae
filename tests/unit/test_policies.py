"""What the project asks of its own source: the field's words, and names of files."""

import re

from support.place import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))

# Private words, and the standard terms that stand in their place.
BANNED = {
    r"foret(old|ells?)": "predicted",
    r"fullest": "maximum over ranks",
    r"on paper": "step-time model",
    r"wish(es|ed)?\b": "request",
    r"\bdesk\b": "rendezvous",
    r"\bkeeper\b": "checkpoint manager",
    r"\banew\b": "from scratch",
    r"\bstruck\b|\bstrikes?\b": "injected, hit",
    r"\bbrothers?\b": "another process",
    r"\bfor ever\b": "forever",
    r"\bruins?\b": "idempotent",
    r"holds? still": "pauses",
    r"tells? the truth|the truth that": "reference",
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
    *SOURCES,
    *sorted((ROOT / "src").rglob("*.j2")),
    *(p for p in sorted((ROOT / "hpc").rglob("*")) if p.is_file()),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "run.sh", "edf.toml", "Makefile")),
    *(ROOT / f"{n}" for n in ("run_benchmarks.py", "collect_results.py", "plot_results.py")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_the_words_are_those_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}, say {instead!r}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word, instead in BANNED.items()
        if (match := re.search(word, line, re.IGNORECASE))
    ]
    assert found == []


def test_each_file_of_tests_has_a_name_of_its_own() -> None:
    """pytest would not collect the second one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
