"""docs/security.md names a test for every promise: each of them is there."""

import re
from pathlib import Path

from support.place import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
ODD = (ROOT / "docs" / "odd-systems.md").read_text()


def test_every_test_that_the_page_names_exists_and_all_are_named() -> None:
    rows = []
    for text in (PAGE.split("## Not trusted")[1], ODD):
        lines = text.split("## Limits")[0].splitlines()
        rows += [line for line in lines if line.startswith("| ")][1:]
    named = {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)}
    assert all(re.search(r"\.py`", row.rsplit("|", 2)[1]) for row in rows)
    own = Path(__file__).parent
    assert [n for n in named if not ((own / n).is_file() or (ROOT / n).is_file())] == []
    assert {p.name for p in own.glob("test_*.py")} - {Path(__file__).name} <= named
