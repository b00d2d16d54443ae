"""The page of the 110 requirements: each has its row, and the command of each row is taken."""

import re

import pytest
import test_documents as documents

from support.place import ROOT

PAGE = (ROOT / "docs" / "requirements.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+) \| (.*) \| ?(.*)\|$", PAGE, re.MULTILINE)
WITHOUT: set[int] = set()  # of what there is no command


def test_every_requirement_has_its_row_with_a_place() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 111))
    assert all(place.strip() for _, _, place, _ in ROWS)
    assert {int(number) for number, *_, command in ROWS if not command.strip()} == WITHOUT
    named = {int(n): re.findall(r"`([\w./-]+)`", place) for n, _, place, _ in ROWS}
    linked = {int(n) for n, _, place, _ in ROWS if re.search(r"\]\([^)]+\)", place)}
    there = {n for n, names in named.items() if any((ROOT / name).exists() for name in names)}
    assert set(range(1, 111)) - linked - there == set()


@pytest.mark.parametrize("cell", sorted({row[3].strip() for row in ROWS if row[3].strip()}))
def test_its_command_is_taken(cell: str) -> None:
    line = re.fullmatch(r"`([^`]+)`", cell)
    assert line is not None, cell
    documents.test_commands_are_taken(line[1])
