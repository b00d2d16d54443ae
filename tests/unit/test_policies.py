"""What the project asks of its own pages and tests: short lines, and names of test files."""

import itertools
import re

from support.place import ROOT

# Of a page: code blocks, comments and generated tables.
NO_PROSE = re.compile(r"<!-- generated.*?<!-- end -->|^```.*?^```|<!--.*?-->", re.M | re.S)


def test_lines_and_names() -> None:
    found = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        prose = NO_PROSE.sub("", page.read_text()).splitlines()
        long = (line for line in prose if len(line) > 100 and line[0] != "|")
        found += [f"{page.name}: longer than 100: {line}" for line in long]
    if (lines := len((ROOT / "README.md").read_text().splitlines())) > 220:
        found.append(f"README.md is an overview: {lines} lines")
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    # pytest would not collect the second one.
    found += [f"two files {n}" for n, after in itertools.pairwise(names) if n == after]
    assert found == []
