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
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

from jobkit.analysis.figures.draw import FIGURES
from jobkit.analysis.tables import columns
from jobkit.drill.faults import FAULTS
from jobkit.metric.kinds import KINDS
from jobkit.spec.options import heading
from jobkit.spec.runspec import RunSpec
from jobkit.spec.settings import describe

ROOT = Path(__file__).resolve().parents[1]
HINTS = typing.get_type_hints(RunSpec)
PAGES = sorted((ROOT / "docs").glob("*.md"))
_TABLE = re.compile(r"(<!-- generated: ([\w. -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OUTPUT = re.compile(r"(<!-- output: (python -m jobkit .+?) -->\n```text\n).*?(```)", re.DOTALL)

# Fields of records that are no numbers.
NO_NUMBERS = {
    "text": "node_list device device_type backend git_commit job_id source unit work_source host "
    "gpu_uuids energy_source name reason action operation scope level text status",
    "object": "spec versions values",
    "list": "parts collectives exposed",
    "true or false": "alone warmup gpu correct",
}


def type_of(field: str) -> str:
    """The JSON type of a record's field."""
    return next((name for name, fields in NO_NUMBERS.items() if field in fields.split()), "number")


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def kinds() -> str:
    """A list of fields for each kind of record."""
    parts = []
    for kind, meanings in KINDS.items():
        types = ((name, type_of(name)) for name in meanings)
        words = {name: f" ({kind})" if kind != "number" else "" for name, kind in types}
        rows = (f"- `{name}`{words[name]}: {text}" for name, text in meanings.items())
        parts.append(f"### {kind}\n\n" + "\n".join(rows))
    return "\n" + "\n\n".join(parts) + "\n"


def settings() -> str:
    """Every setting by its group: its option, what it does, what it may be, its default."""
    lines, group = [], ""
    for f in fields(RunSpec):
        if (new := heading(f) or group) != group:
            lines += ["", f"## {new.capitalize()}", ""]
            group = new
        name = f"--{f.name.replace('_', '-')}" if f.metadata["option"] else f.name
        values = code(f.metadata["choices"] or ())
        if not values and not isinstance(f.default, bool):
            values = describe(HINTS[f.name], f.metadata).removeprefix("a string")
            values = re.sub(r"^a (whole )?number,? ?", "", values)
        if f.default is not None:
            values += f"{'; ' if values else ''}default {json.dumps(f.default)}".replace('"', "`")
        lines.append(f"- `{name}`: {f.metadata['help']}{f' ({values})' if values else ''}")
    return "\n".join([*lines, ""])


def csv(table: str) -> str:
    """The columns of a CSV file; what another file or a record has already, by its name alone."""
    known = {c: name for name in reversed(columns.TABLES) for c in columns.TABLES[name]}
    recorded = {pair: kind for kind in reversed(KINDS) for pair in KINDS[kind].items()}
    lines, elsewhere = [], defaultdict(list)
    names = {column.name: column for column in columns.TABLES[table]}
    for name, column in names.items():
        first = re.sub(r"_(?:low|high)(_s)?$", lambda m: m[1] or "", name)
        if {first, name.replace("_max", "_mean")} & names.keys() - {name}:
            continue  # it stands on the line of the first
        stem, unit = (name[:-2], "_s") if name.endswith("_s") else (name, "")
        ends = [n for n in (f"{stem}_low{unit}", f"{stem}_high{unit}") if n in names]
        meaning = column.meaning
        if "_mean" in name and (largest := name.replace("_mean", "_max")) in names:
            ends, meaning = [largest], meaning.replace("mean over", "mean and maximum over")
        if kind := recorded.get((name, meaning)):
            elsewhere[f"as in the record [{kind}](metric-line.md#{kind})"] += [name, *ends]
        elif known[column] != table:
            file = known[column]
            elsewhere[f"as in [{file}.csv](#{file}csv)"] += [name, *ends]
        elif meaning.startswith("version of "):
            elsewhere["versions; empty where there is none"].append(name)
        else:
            lines.append(f"- {code([name, *ends])}: {meaning}")
    lines += [f"- {code(names)}: {where}" for where, names in elsewhere.items()]
    return "\n".join(lines)


def figures() -> str:
    """Every figure and its caption."""
    return table(("figure", "shows"), ((f"`{f.name}`", f.caption) for f in FIGURES))


def faults() -> str:
    """Every fault of the drill."""
    return table(("fault", "what happens"), ((f"`{f.name}`", f.text) for f in FAULTS.values()))


TABLES: dict[str, Callable[[], str]] = {
    **{f"{name}.csv": functools.partial(csv, name) for name in columns.TABLES},
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
