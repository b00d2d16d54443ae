"""What the project asks of its own words: the field's terms, short lines, names of test files."""

import itertools
import re

from support.place import ROOT

# Private words, and the standard terms that stand in their place.
BANNED = {
    r"foret(old|ells?)": "predicted",
    r"the truth\b": "reference",
    r"on paper": "step-time model",
    r"\bwish(es|ed)?\b": "request",
    r"\bdesk\b": "rendezvous",
    r"\bkeeper\b": "checkpoint manager",
    r"\banew\b": "from scratch",
    r"\bstruck\b|\bstrikes?\b": "injected, hit",
    r"\bbrothers?\b": "another process",
    r"\bfor ever\b": "forever",
    r"\bruins?\b": "idempotent",
    r"plant(s|ed)? (a )?faults?": "inject faults",
    r"one a (GPU|rank|node)": "one per GPU",
    r"(images|samples|bytes|bits) a second": "per second",
    r"\btwins?\b": "communication-free replica",
}
TEXTS = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.j2")),
    *(p for p in sorted((ROOT / "hpc").rglob("*")) if p.is_file()),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "run.sh", "edf.toml", "Makefile")),
    *(ROOT / f"{n}.py" for n in ("run_benchmarks", "collect_results", "plot_results")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


# Of a page: code blocks, comments and generated tables.
NO_PROSE = re.compile(r"<!-- generated.*?<!-- end -->|^```.*?^```|<!--.*?-->", re.M | re.S)


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
    for page in (path for path in TEXTS if path.suffix == ".md"):
        prose = NO_PROSE.sub("", page.read_text()).splitlines()
        long = (line for line in prose if len(line) > 100 and line[0] != "|")
        found += [f"{page.name}: longer than 100: {line}" for line in long]
    if (lines := len((ROOT / "README.md").read_text().splitlines())) > 220:
        found.append(f"README.md is an overview: {lines} lines")
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    # pytest would not collect the second one.
    found += [f"two files {n}" for n, after in itertools.pairwise(names) if n == after]
    assert not found, "\n".join(found)
