"""The tables of docs/ that come from the source; `make docs` writes them, a test compares them.

A page holds `<!-- generated: NAME -->`, the table, `<!-- end -->`; and `<!-- output: COMMAND -->`
before a fenced block that is what the command prints (from its first table on for `jobkit memory`).
"""

import functools
import json
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

from jobkit.analysis.figures.draw import FIGURES
from jobkit.analysis.tables import columns
from jobkit.drill.faults import FAULTS
from jobkit.metric.kinds import KINDS
from jobkit.spec.runspec import RunSpec
from jobkit.spec.settings import describe

ROOT = Path(__file__).resolve().parents[1]
HINTS = typing.get_type_hints(RunSpec)
PAGES = sorted((ROOT / "docs").glob("*.md"))
_TABLE = re.compile(r"(<!-- generated: ([\w. -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OUTPUT = re.compile(r"(<!-- output: (python -m jobkit .+?) -->\n```text\n).*?(```)", re.DOTALL)

# Fields of records that are not numbers with a unit in their name.
INTEGERS = {"world_size", "nodes", "global_batch_size", "batch_size_per_rank", "train_samples"}
INTEGERS |= {"test_samples", "parameters", "threads", "epoch", "iterations", "timed_images"}
INTEGERS |= {"begun_at", "iteration", "bytes", "ranks", "step", "steps", "warmup_steps"}
TEXTS = {"node_list", "device", "device_type", "backend", "git_commit", "job_id", "action"}
TEXTS |= {"operation", "scope", "level", "text", "status", "reason"}
TEXTS |= {"source", "unit", "work_source", "name", "host", "gpu_uuids", "energy_source"}
OBJECTS, FLAGS = {"spec", "versions", "values"}, {"correct", "warmup", "certain", "alone"}


def type_of(field: str) -> str:
    """The JSON type of a record's field."""
    types = {"integer": INTEGERS, "text": TEXTS, "object": OBJECTS, "true or false": FLAGS}
    return next((name for name, members in types.items() if field in members), "number")


def unit_of(field: str) -> str:
    """The unit that a field's name says; nothing where it is a count, a share or no number."""
    ends = {"images_per_s": "images/s", "_gb_per_s": "GB/s", "_s": "s", "_mib": "MiB", "bytes": "B"}
    return next((unit for end, unit in ends.items() if field.endswith(end)), "")


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def kinds() -> str:
    """A table of fields for each kind of record."""
    head = ("field", "type", "unit", "meaning")
    parts = []
    for kind, own in KINDS.items():
        rows = ((f"`{name}`", type_of(name), unit_of(name), text) for name, text in own.items())
        parts.append(f"### {kind}\n\n{table(head, rows)}")
    return "\n" + "\n\n".join(parts) + "\n"


def settings() -> str:
    """Every setting: its option, what it may be, its default, what it does."""
    rows = []
    for f in fields(RunSpec):
        name = f"`--{f.name.replace('_', '-')}`" if f.metadata["option"] else f"`{f.name}`"
        values = ", ".join(f.metadata["choices"] or ()) or describe(HINTS[f.name], f.metadata)
        default = "" if f.default is None else json.dumps(f.default).strip('"')
        rows.append((name, values, default, f.metadata["help"]))
    return table(("setting", "value", "default", "meaning"), rows)


def figures() -> str:
    """Every figure and its caption."""
    return table(("figure", "shows"), ((f"`{f.name}`", f.caption) for f in FIGURES))


def faults() -> str:
    """Every fault of the drill."""
    return table(("fault", "what happens"), ((f"`{f.name}`", f.text) for f in FAULTS.values()))


TABLES: dict[str, Callable[[], str]] = {
    **{
        f"{name}.csv": functools.partial(columns.markdown, found)
        for name, found in columns.TABLES.items()
    },
    "settings": settings,
    "kinds": kinds,
    "figures": figures,
    "faults": faults,
}


def with_tables(text: str) -> str:
    """The page with the tables of the source as it is now."""
    return _TABLE.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


def output(command: str) -> str:
    """What a command prints; of `jobkit memory` the table alone."""
    words = [sys.executable, *shlex.split(command)[1:]]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return said.split("\n\n")[1] + "\n" if " memory " in command else said


def with_outputs(text: str) -> str:
    """The page with what its commands print now; they import torch."""
    return _OUTPUT.sub(lambda m: f"{m[1]}{output(m[2])}{m[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_outputs(with_tables(page.read_text())))
