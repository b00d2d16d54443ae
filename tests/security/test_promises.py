"""docs/security.md names a test for every rule, and every test of this folder."""

import re
from pathlib import Path

from support.place import ROOT


def test_every_test_that_the_page_names_exists_and_all_are_named() -> None:
    rules = (ROOT / "docs" / "security.md").read_text().split("## Trusted")[0]
    rows = [line for line in rules.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 7 and all(re.search(r"\.py`", row.rsplit("|", 2)[1]) for row in rows)
    named, own = set(re.findall(r"`([\w/]+\.py)`", rules)), Path(__file__).parent
    assert [n for n in named if not ((own / n).is_file() or (ROOT / n).is_file())] == []
    assert {p.name for p in own.glob("test_*.py")} - {Path(__file__).name} <= named
