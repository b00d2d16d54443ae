"""The summary of a study, for a terminal and, as JSON, for a program."""

import dataclasses
import json
import textwrap
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.style import unit
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.report.tables import proposal_table
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import TextTable


def terminal() -> Console:
    """The terminal; where there is none a page so wide that no line in a file is truncated."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def print_table(console: Console, table: TextTable) -> None:
    """Print the rows of a table; a series that goes on is named once."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown.add_column("series", overflow="fold")
    for i, head in enumerate(table.heads[1:], 1):
        text = textwrap.fill(head, 8, break_long_words=False)
        shown.add_column(text, justify="left" if i < table.words else "right", no_wrap=True)
    before = ""
    for series, *cells in table.rows:
        shown.add_row(*map(Text, ["" if series == before else series, *cells]))
        before = series
    console.print(shown)


def print_summary(results: Results, console: Console | None = None) -> None:
    """Print the table of sizes, every run that is not ok, and the warnings."""
    console, content = console or terminal(), _content(results)
    console.print(Text(f"{results.name}: {content['runs_ok']} of {content['runs']} runs ok"))
    table = proposal_table(results, unit(results), terminal=True)
    print_table(console, table)
    lines = [table.notes[0]]
    for row in content["not_ok"]:
        lines.append(f"{row['status']:9} {row['run_id']}: {row['reason']}")
        if row["evidence"] and row["evidence"] not in (row["reason"] or ""):
            lines.append(f"{'':9} {row['evidence_file']}: {row['evidence']}")
    for line in [*lines, *(f"warning: {line}" for line in content["warnings"])]:
        console.print(Text(line), soft_wrap=True)


def print_verdict(results: Results, least: float) -> None:
    """Print the first three lines of the report."""
    print("\n".join(verdict(results, unit(results), least)[:3]))


def as_json(results: Results) -> str:
    """The summary as JSON, at full precision; null for what is not known."""
    content = {
        "study": results.name,
        "folder": str(results.folder),
        "verdict": verdict(results, unit(results)),
        **_content(results),
        "sizes": [dataclasses.asdict(size) for size in results.sizes],
    }
    return json.dumps(content, indent=1)


def _content(results: Results) -> dict[str, Any]:
    """What both forms of the summary have; of runs that are not ok reason and evidence."""
    ok = results.runs["status"] == "ok"
    names = ["run_id", "status", "reason", "evidence", "evidence_file"]
    return {
        "ok": results.ok,
        "runs": len(ok),
        "runs_ok": int(ok.sum()),
        "not_ok": records(results.runs.loc[~ok, names]),
        "warnings": results.warnings(),
    }
