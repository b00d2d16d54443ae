"""What README.md and docs/ promise is there: links, files, commands, options, tables, words.

Each test collects all that it finds, so that one run shows everything.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import io
import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from generated_docs import PAGES, ROOT, TABLES, with_tables
from jobkit.__main__ import COMMANDS
from jobkit.analysis.tables import columns
from jobkit.errors import Exit
from jobkit.launch import cli, start
from jobkit.spec.runspec import STRATEGIES
from jobkit.spec.study import Study

CHAPTERS = sorted((ROOT / "docs" / "exercises").glob("*.md"))
_TOP = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
TEXTS = {path: path.read_text() for path in (*_TOP, *PAGES, *CHAPTERS)}
README, ALL = TEXTS[ROOT / "README.md"], "".join(TEXTS.values())
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Of Slurm's commands, of containers and of benchmarks: named in the text, and not jobkit's.
OF_OTHERS = """
--kill-on-bad-exit=1 --environment= --container-image= --requeue --mem --nv --rocm -- --prefix
--gpu-bind=none --gres=gpu:4 --gpus-per-task=1 --gpus-per-node=4 --ntasks --nodes=2 --label
--signal=USR2 --signal=TERM --signal --signal=USR2@60 --signal=CONT@1 --cpus-per-task
"""


def page(name: str) -> str:
    return TEXTS[ROOT / "docs" / f"{name}.md"]


def prose(text: str) -> str:
    """A page without its code blocks, comments and generated tables."""
    text = re.sub(r"<!-- generated.*?<!-- end -->", "", text, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return [code for found, code in _FENCE.findall(text) if found == language]


def lines() -> list[str]:
    code = "".join("".join(blocks(text, "bash")) for text in TEXTS.values())
    return list(dict.fromkeys(filter(None, code.splitlines())))


def is_dead(page: Path, link: str) -> bool:
    """Whether a link of a page leads to no file of ours, or to no heading in it."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if link.startswith("https://") or not (target.exists() and anchor):
        return not (link.startswith("https://") or target.exists())
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", TEXTS[target]), re.MULTILINE)
    # As the usual viewers of Markdown make them.
    return anchor not in {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def test_links_and_files_are_there() -> None:
    links = [(p, link) for p, t in TEXTS.items() for link in re.findall(r"\]\(([^)\s]+)\)", t)]
    found = [f"{page.name}: {link} leads nowhere" for page, link in links if is_dead(page, link)]
    navigation = (ROOT / "tools" / "site.yml").read_text().split("nav:")[1]
    site = set(re.findall(r"([\w/-]+\.md)\b", navigation)) - {"index.md"}
    pages = {str(p.relative_to(ROOT / "docs")) for p in (*PAGES, *CHAPTERS)}
    found += [f"nav of tools/site.yml: {name}" for name in site ^ pages]
    absent = {page.name for page in PAGES} - {*re.findall(r"\]\(docs/(\S+?)\)", README)}
    found += [f"README.md has no link to {name}" for name in absent]
    named = set(
        re.findall(r"(?<![/\w])((?:hpc|tests|tools|src)/[a-z_/.-]+\.(?:sh|py|toml))\b", ALL)
    )
    found += [f"no file {n}" for n in named - {"hpc/sites/mine.toml"} if not (ROOT / n).exists()]
    found += absent_targets({*re.findall(r"`make ([a-z-]+)`", ALL)})
    assert not found, "\n".join(found)


def test_the_architecture_has_every_room() -> None:
    """Every folder of the source has its line, and every line its folder and files."""
    told = {name.rstrip("/") for name in first_cells(page("architecture"), "folder of `src/`")}
    source = ROOT / "src"
    there = {str(p.parent.relative_to(source)) for p in source.glob("**/*.py")}
    nested = "jobkit/checks/"  # told by the line of their folder
    rooms = {name for name in there if not name.startswith(nested)} - {"jobkit"}
    assert told == rooms | {"jobkit/*.py"}
    row = r"(?m)^\| `([\w/]+/)(?:\*\.py)?` \| ([^|]+)\| [^|]+ \| [^|]+ \|$"
    rows = re.findall(row, page("architecture"))
    files = [source / folder / f for folder, text in rows for f in re.findall(r"`(\w+)`", text)]
    assert len(files) > 70 and not [f for f in files if not f.with_suffix(".py").exists()]


def test_tables_are_those_of_the_source() -> None:
    """Generated tables; and options of run.sh, exit codes, commands and strategies by hand."""
    found = [f"{p.name}: make docs" for p, text in TEXTS.items() if with_tables(text) != text]
    for part in re.split("^## ", page("columns"), flags=re.MULTILINE)[1:]:
        file = part.split(".csv")[0]
        absent = {c.name for c in columns.TABLES[file]} - {*re.findall(r"`(\w+)`", part)}
        found += [f"columns.md, {file}.csv: column {name}" for name in absent]
    named = first_cells(page("quickstart"), "option")
    taken = {word.split()[0] for word in named if word[:2] == "--"} - OWN_OF_RUN_SH
    found += [f"quickstart.md: option {name}" for name in taken]
    text = page("quickstart").split("## Exit codes")[1].split("## ")[0]
    codes = ",".join(re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)).split(",")
    for where, told, known in (
        ("docs/, generated", re.findall(r"<!-- generated: (.+?) -->", ALL), TABLES),
        ("quickstart.md, exit codes", [*map(int, codes)], Exit),
        ("README.md, commands", first_cells(README, "`python -m jobkit ...`"), COMMANDS),
        ("strategies.md, --strategy", first_cells(page("strategies"), "`--strategy`"), STRATEGIES),
    ):
        found += [f"{where}: the table lacks {name}" for name in {*known} - {*told}]
        found += [f"{where}: {name} is not in the source" for name in {*told} - {*known}]
    assert not found, "\n".join(found)


def first_cells(text: str, head: str) -> list[str]:
    """The code words in the first cells of the table with this head."""
    (rows,) = re.findall(rf"^\| {re.escape(head)}.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return re.findall("`([^`]+)`", "".join(row.split("|")[1] for row in rows.splitlines()))


# Private words, in whose place the field has terms: docs/glossary.md.
BANNED = re.compile(
    r"foret(old|ells?)|the truth\b|on paper|\bwish(es|ed)?\b|\bdesk\b|\bkeeper\b|\banew\b"
    r"|\bstruck\b|\bstrikes?\b|\bbrothers?\b|\bfor ever\b|\bruins?\b|plant(s|ed)? (a )?faults?"
    r"|\btwins?\b|one a (GPU|rank|node)|(images|samples|bytes|bits) a second", re.IGNORECASE
)  # fmt: skip


def test_words_and_lines() -> None:
    """The field's terms in all that a user reads, short lines, and names of tests of their own."""
    source = [p for end in ("py", "j2") for p in (ROOT / "src").rglob(f"*.{end}")]
    source += [p for p in (ROOT / "hpc").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    source += [ROOT / "run.sh", ROOT / "edf.toml", ROOT / "Makefile", *ROOT.glob("*.py")]
    texts = TEXTS | {path: path.read_text() for path in source}
    found = [f"{p}: {word[0]!r}" for p, text in texts.items() for word in BANNED.finditer(text)]
    for path, text in TEXTS.items():
        long = (line for line in prose(text).splitlines() if len(line) > 100 and line[0] != "|")
        found += [f"{path.name}: longer than 100: {line}" for line in long]
    if (count := README.count("\n")) > 150:
        found.append(f"README.md is an overview: {count} lines")
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    # pytest would not collect the second one.
    found += [f"{count} files {name}" for name, count in names.items() if count > 1]
    assert not found, "\n".join(found)


# Commands: parsed by the parser that each makes, without running it.

VALUED_OF_RUN_SH = {f"--{name}" for name in start.OPTIONS}
OWN_OF_RUN_SH = VALUED_OF_RUN_SH | {f"--{name}" for name in start.FLAGS} | {"--check"}


class MadeError(Exception):
    """Ends a command where it would read its arguments, with the parser that it made."""


@functools.cache
def parser_of(module: str, function: str = "main", *_: object) -> argparse.ArgumentParser:
    """The parser that a function hands its arguments to."""

    def caught(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise MadeError(parser)

    command = getattr(importlib.import_module(module), function)
    patched = mock.patch.object(argparse.ArgumentParser, "parse_known_args", caught)
    with patched, pytest.raises(MadeError) as made:
        command([])
    return made.value.args[0]


def of_command(name: str) -> argparse.ArgumentParser:
    return parser_of(*COMMANDS[name][:2])


def options(parser: argparse.ArgumentParser) -> set[str]:
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name for each in action.choices.values() for name in options(each)}
    return found


def parse(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Why a command does not take its words; what comes after -- is for another program."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        parser.parse_args(words[: words.index("--")] if "--" in words else words)
    return said.getvalue().splitlines()[-1:]


def run_sh(words: list[str]) -> list[str]:
    """The words after run.sh: its own options anywhere, the rest for the training."""
    kept: list[str] = []
    rest = words
    while rest:
        taken = 1 + (rest[0] in VALUED_OF_RUN_SH) if rest[0] in OWN_OF_RUN_SH - {"--check"} else 0
        kept, rest = kept + ([] if taken else rest[:1]), rest[taken or 1 :]
    comm = "--comm" in words
    return parse(of_command("comm") if comm else parser_of("jobkit.payload.main"), kept)


def absent_targets(words: set[str]) -> list[str]:
    makefile = (ROOT / "Makefile").read_text()
    return [f"no target {w}" for w in words if not re.search(rf"^{w}:.*##", makefile, re.MULTILINE)]


SHELL = {"source", "export", "cp", "mkdir", "pip", "$EDITOR", "sinfo", "eval", "pytest"}
SHELL |= {"register-python-argcomplete"}
DOORS = {"run_benchmarks.py": "run", "collect_results.py": "collect"}
DOORS |= {"plot_results.py": "plot", "./plot_results.sh": "plot"}


def not_taken(line: str) -> list[str]:
    """What is wrong with a command line, as the command that it calls says."""
    line = line.replace("$(jobkit --prefix)/", "").replace("python -m jobkit", "jobkit")
    words = shlex.split(line)
    program, *rest = words[words[0] in ("python", "bash", "sbatch") :]
    ours = r"(run|hpc/.*)\.sh|(docs|tests)/.*\.py"
    script = next((word for word in words if re.fullmatch(ours, word)), "")
    if program in SHELL:
        return []
    if script:
        if not (ROOT / script).exists():
            return [f"no {script}"]
        rest = words[words.index(script) + 1 :]
        if re.match("run|hpc/train|hpc/comm", script):
            return run_sh([*["--comm"][: "comm" in script], *rest])
        source = (ROOT / script).read_text()
        return [w for w in rest if w.startswith("--") and w not in source]
    if program == "make":
        return absent_targets({*rest})
    if program == "hpc/minicluster":
        return parse(parser_of("minicluster.cli"), rest)
    if program == "jobkit":
        program, *rest = rest
    name = DOORS.get(program, program)
    return parse(of_command(name), rest) if name in COMMANDS else ["no check for this command"]


def test_commands_and_options_are_taken() -> None:
    """Each command line is parsed by the command that it calls; options exist and have a help."""
    found = [f"{line}: {why}" for line in lines() for why in not_taken(line)]
    parsers = [of_command(name) for name in {*COMMANDS} - {"verify"}]  # which needs torch
    found += [f"{p.prog}: {a.dest}: no help" for p in parsers for a in p._actions if not a.help]
    assert all(parser.description for parser in parsers)
    others = (parser_of("jobkit.payload.main"), parser_of("minicluster.cli"))
    known = set.union(OWN_OF_RUN_SH, *map(options, (*parsers, *others)), OF_OTHERS.split())
    for bench in (ROOT / "tests" / "bench").glob("*.py"):
        known |= {*re.findall('"(--[a-z-]+)"', bench.read_text())}
    for path, text in TEXTS.items():
        words = " ".join(re.findall(r"`([^`]+)`", prose(text))).split()
        wrong = {word for word in words if word[:2] == "--"} - known
        wrong |= {*re.findall(r"python -m jobkit ([a-z][a-z0-9-]+)", text)} - {*COMMANDS}
        found += [f"{path.name}: {word}" for word in wrong]
    assert not found, "\n".join(found)


def test_every_requirement_has_its_place_and_a_command() -> None:
    rows = tomllib.loads((ROOT / "tests" / "requirements.toml").read_text())["requirement"]
    assert [row["number"] for row in rows] == list(range(1, 111))
    found = []
    for row in rows:
        links = re.findall(r"\]\(([^)]+)\)", row["where"])
        wrong = [*not_taken(row["command"]), *(x for x in links if is_dead(ROOT / "docs" / "x", x))]
        names = re.findall(r"`([\w./-]+)`", row["where"])
        if not links and not any((ROOT / name).exists() for name in names):
            wrong.append(f"no place in {row['where']}")
        found += [f"{row['number']}: {why}" for why in wrong]
    assert not found, "\n".join(found)


def test_the_page_of_security_names_a_test_for_every_rule_and_every_test() -> None:
    rules = page("security").split("## Trusted")[0]
    rows = [line for line in rules.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 7 and all(re.search(r"\.py`", row.rsplit("|", 2)[1]) for row in rows)
    named, own = set(re.findall(r"`([\w/]+\.py)`", rules)), ROOT / "tests" / "security"
    assert [n for n in named if not ((own / n).is_file() or (ROOT / n).is_file())] == []
    assert {path.name for path in own.glob("test_*.py")} <= named


def test_studies_of_the_documents_expand(monkeypatch) -> None:
    monkeypatch.setattr(cli, "find_site", lambda _: None)  # the reader's own
    starts = ("python run_benchmarks.py", "jobkit run")
    for words in (shlex.split(line)[2:] for line in lines() if line.startswith(starts)):
        end = words.index("--") if "--" in words else len(words)
        args = cli.make_parser(end < len(words)).parse_args(words[:end])
        args.command = tuple(words[end + 1 :])
        assert args.study == "mine.toml" or cli.make_plan(args).runs


def test_files_in_the_documents_are_what_their_text_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(*blocks(page("studies"), "toml"))
    runs = len(Study.load(path).expand().runs)
    assert runs == 2 * 4 * 3 * 2 and f"plans {runs} runs" in page("studies")
    path.write_text(*blocks(page("own-program"), "toml"))
    of_command = Study.load(path).expand().runs.values()
    assert len(of_command) == 2 * 4 * 3 and {s.scaling for s in of_command} == {"strong"}
    words = {f"--gradient_accumulation_steps={n}" for n in (40, 20, 10, 5)}
    assert {s.arguments()[-1] for s in of_command} == words
    (code,) = blocks(README, "python")
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert all(hasattr(module, alias.name) for alias in node.names), node.module
