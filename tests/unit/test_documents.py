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
from pathlib import Path
from unittest import mock

import pytest

from generated_docs import PAGES, ROOT, TABLES, with_tables
from jobkit.__main__ import COMMANDS
from jobkit.analysis.tables import columns
from jobkit.errors import Exit
from jobkit.launch import start
from jobkit.launch.cli import DEFAULT_STUDY
from jobkit.spec.options import with_words
from jobkit.spec.runspec import STRATEGIES
from jobkit.spec.study import Study

CHAPTERS = sorted((ROOT / "docs" / "exercises").glob("*.md"))
TEXTS = {
    path: path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *CHAPTERS)
}
README = TEXTS[ROOT / "README.md"]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Of Slurm's commands, of containers and of benchmarks: named in the text, and not jobkit's.
OF_OTHERS = {
    *("--kill-on-bad-exit=1", "--environment=", "--container-image=", "--requeue", "--mem", "--nv"),
    *("--rocm", "--gpu-bind=none", "--gres=gpu:4", "--gpus-per-task=1", "--gpus-per-node=4"),
    *("--ntasks", "--nodes=2", "--world-sizes", "--signal=USR2", "--signal=TERM", "--signal"),
    *("--signal=USR2@60", "--signal=CONT@1", "--cpus-per-task", "--label", "--prefix", "--"),
    *("--rounds", "--studies", "--only", "--held-out"),
}


def prose(text: str) -> str:
    """A page without its code blocks and generated tables."""
    text = re.sub(r"<!-- generated.*?<!-- end -->", "", text, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return [code for found, code in _FENCE.findall(text) if found == language]


def lines() -> list[str]:
    code = "".join("".join(blocks(text, "bash")) for text in TEXTS.values())
    return list(dict.fromkeys(filter(None, code.splitlines())))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual viewers of Markdown make them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", TEXTS[page]), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def is_dead(page: Path, link: str) -> bool:
    """Whether a link of a page leads to no file of ours, or to no heading in it."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    known = target.exists() and (not anchor or anchor in anchors(target))
    return not known and not link.startswith("https://")


def test_links_and_files_are_there() -> None:
    links = [(p, link) for p, t in TEXTS.items() for link in re.findall(r"\]\(([^)\s]+)\)", t)]
    found = [f"{page.name}: {link} leads nowhere" for page, link in links if is_dead(page, link)]
    navigation = (ROOT / "tools" / "site.yml").read_text().split("nav:")[1]
    site = re.findall(r"([\w/-]+\.md)\b", navigation)
    pages = {str(p.relative_to(ROOT / "docs")) for p in (*PAGES, *CHAPTERS)}
    found += [f"nav of tools/site.yml: {name}" for name in {*site} ^ (pages | {"index.md"})]
    absent = {page.name for page in PAGES} - {*re.findall(r"\]\(docs/(\S+?)\)", README)}
    found += [f"README.md has no link to {name}" for name in sorted(absent)]
    folders = (
        r"(?:\./)?((?:hpc/(?:sites/)?|tests/(?:bench|unit)/|tools/)?[a-z_-]+\.(?:sh|py|toml))\b"
    )
    named = set(re.findall(rf"(?<![/\w]){folders}", "".join(TEXTS.values())))
    # Files of runs and of the reader; files in a folder that the text names before.
    named -= {"site.sh", "job.sh", "mine.toml", "patches.py", "waiting.py", "train.py"}
    named -= {"hpc/sites/mine.toml", "example.toml", "__init__.py", "sitecustomize.py"}
    named -= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named |= {path for text in TEXTS.values() for path in re.findall(r"`(src/[\w/.]+)`", text)}
    found += [f"no file {name}" for name in sorted(named) if not (ROOT / name).exists()]
    targets = {t for text in TEXTS.values() for t in re.findall(r"`make ([a-z-]+)`", text)}
    found += absent_targets(targets)
    assert not found, "\n".join(found)


def test_the_architecture_has_every_room() -> None:
    """Every folder of the source has its line, and every line its folder."""
    page = TEXTS[ROOT / "docs" / "architecture.md"]
    told = {name.rstrip("/") for name in first_cells(page, "folder of `src/`")} - {"jobkit/*.py"}
    source = ROOT / "src"
    there = {str(p.parent.relative_to(source)) for p in source.glob("**/*.py")}
    nested = "jobkit/checks/"  # told by the line of their folder
    assert told == {name for name in there if not name.startswith(nested)} - {"jobkit"}
    rows = re.findall(
        r"^\| `([\w/]+/)(?:\*\.py)?` \| ([^|]+)\| [^|]+ \| [^|]+ \|$", page, re.MULTILINE
    )
    files = [source / folder / f for folder, text in rows for f in re.findall(r"`(\w+)`", text)]
    assert len(files) > 70
    found = [f"architecture.md: no {f}" for f in files if not f.with_suffix(".py").exists()]
    assert not found, "\n".join(found)


def test_tables_are_those_of_the_source() -> None:
    """Generated tables; and options of run.sh, exit codes, commands and strategies by hand."""
    found = [f"{p.name}: make docs" for p, text in TEXTS.items() if with_tables(text) != text]
    tables = set(re.findall(r"<!-- generated: (.+?) -->", "".join(TEXTS.values())))
    found += [f"generated table {name}" for name in tables ^ set(TABLES)]
    for part in re.split("^## ", TEXTS[ROOT / "docs" / "columns.md"], flags=re.MULTILINE)[1:]:
        file = part.split(".csv")[0]
        absent = {c.name for c in columns.TABLES[file]} - {*re.findall(r"`(\w+)`", part)}
        found += [f"columns.md, {file}.csv: column {name}" for name in absent]
    page = TEXTS[ROOT / "docs" / "quickstart.md"]
    named = {word for word in first_cells(page, "option") if word.startswith("--")}
    known = OWN_OF_RUN_SH | {"--check", "--dry-run"}
    absent = {name.split()[0] for name in named} - known
    found += [f"quickstart.md: option {name}" for name in absent]
    text = page.split("## Exit codes")[1].split("## ")[0]
    codes = ",".join(re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)).split(",")
    differ = {*map(int, codes)} ^ {int(code) for code in Exit}
    found += [f"quickstart.md: exit code {code}" for code in differ]
    commands = set(first_cells(README, "`python -m jobkit ...`"))
    found += [f"README.md: command {name}" for name in commands ^ set(COMMANDS)]
    told = first_cells(TEXTS[ROOT / "docs" / "strategies.md"], "`--strategy`")
    found += [f"strategies.md: strategy {name}" for name in {*told} ^ set(STRATEGIES)]
    assert not found, "\n".join(found)


def first_cells(text: str, head: str) -> list[str]:
    """The code words in the first cells of the table with this head."""
    (rows,) = re.findall(rf"^\| {re.escape(head)}.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [
        word for row in rows.splitlines() for word in re.findall("`([^`]+)`", row.split("|")[1])
    ]


# Commands: parsed by the parser that each makes, without running it.

RUN_SH = ("jobkit.payload.main", "main")
MINICLUSTER = ("minicluster.cli", "main")
# Options of run.sh itself, but the one for the jobs of a study.
VALUED_OF_RUN_SH = {f"--{name}" for name in start.OPTIONS} - {"--site-file"}
OWN_OF_RUN_SH = VALUED_OF_RUN_SH | {f"--{name}" for name in start.FLAGS}


class MadeError(Exception):
    """Ends a command where it would read its arguments, with the parser that it made."""


@functools.cache
def parser_of(module: str, function: str) -> argparse.ArgumentParser:
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
        taken = 1 + (rest[0] in VALUED_OF_RUN_SH) if rest[0] in OWN_OF_RUN_SH else 0
        kept, rest = kept + ([] if taken else rest[:1]), rest[taken or 1 :]
    return parse(of_command("comm") if "--comm" in words else parser_of(*RUN_SH), kept)


def absent_targets(words: set[str]) -> list[str]:
    makefile = (ROOT / "Makefile").read_text()
    return [f"no target {w}" for w in words if not re.search(rf"^{w}:.*##", makefile, re.MULTILINE)]


SHELL = {"source", "export", "cp", "mkdir", "pip", "$EDITOR", "sinfo", "eval", "pytest"}
SHELL |= {"register-python-argcomplete"}
DOORS = {"run_benchmarks.py": "run", "collect_results.py": "collect"}
DOORS |= {"plot_results.py": "plot", "./plot_results.sh": "plot"}


def not_taken(line: str) -> list[str]:
    """What is wrong with a command line, as the command that it calls says."""
    words = shlex.split(line.replace("$(jobkit --prefix)/", ""))
    program, *rest = words[1:] if words[0] == "python" else words
    script = next((w for w in words if re.fullmatch(r"run\.sh|hpc/(train\w*|comm)\.sh", w)), None)
    if "hpc/gpu-check.sh" in words:
        source = (ROOT / "hpc" / "gpu-check.sh").read_text()
        given = words[words.index("hpc/gpu-check.sh") + 1 :]
        return [w for w in given if w.startswith("--") and f"{w} " not in source]
    if script:
        more = ["--comm"] if "comm" in script else []
        absent = [] if (ROOT / script).exists() else [f"no {script}"]
        return absent + run_sh(more + words[words.index(script) + 1 :])
    if [program, *rest[:1]] == ["-m", "jobkit"]:
        return parse(of_command(rest[1]), rest[2:]) if rest[1] in COMMANDS else [rest[1]]
    if program == "jobkit":
        return parse(of_command(rest[0]), rest[1:])
    if program.startswith("docs/exercises/"):
        return [] if (ROOT / program).exists() else [f"no {program}"]
    if program.startswith("tests/bench/"):
        source = (ROOT / program).read_text()
        return [w for w in rest if w.startswith("--") and f'"{w}"' not in source]
    if program in DOORS:
        return parse(of_command(DOORS[program]), rest)
    if program == "hpc/minicluster":
        return parse(parser_of(*MINICLUSTER), rest)
    if program == "make":
        return absent_targets({*rest})
    return [] if program in SHELL else ["no check for this command"]


def test_commands_and_options_are_taken() -> None:
    """Each command line is parsed by the command that it calls; options exist and have a help."""
    found = [f"{line}: {why}" for line in lines() for why in not_taken(line)]
    known = OF_OTHERS | OWN_OF_RUN_SH
    parsers = [of_command(name) for name in {*COMMANDS} - {"verify"}]  # which needs torch
    found += [f"{p.prog}: {a.dest}: no help" for p in parsers for a in p._actions if not a.help]
    assert all(parser.description for parser in parsers)
    for parser in (*parsers, parser_of(*RUN_SH)):
        known |= options(parser)
    known |= options(parser_of(*MINICLUSTER))
    for page, text in TEXTS.items():
        words = " ".join(re.findall(r"`([^`]+)`", prose(text))).split()
        wrong = {word for word in words if word[:2] == "--"} - known
        wrong |= {*re.findall(r"python -m jobkit ([a-z][a-z0-9-]+)", text)} - {*COMMANDS}
        found += [f"{page.name}: {word}" for word in sorted(wrong)]
    assert not found, "\n".join(found)


def test_every_requirement_has_its_place_and_a_command() -> None:
    rows = tomllib.loads((ROOT / "tests" / "requirements.toml").read_text())["requirement"]
    assert [row["number"] for row in rows] == list(range(1, 111))
    found = []
    for row in rows:
        found += [f"{row['number']}: {row['command']}: {why}" for why in not_taken(row["command"])]
        links = re.findall(r"\]\(([^)]+)\)", row["where"])
        found += [
            f"{row['number']}: {link}" for link in links if is_dead(ROOT / "docs" / "x", link)
        ]
        names = re.findall(r"`([\w./-]+)`", row["where"])
        if not links and not any((ROOT / name).exists() for name in names):
            found.append(f"{row['number']}: no place in {row['where']}")
    assert not found, "\n".join(found)


# Examples


def test_studies_of_the_documents_expand() -> None:
    starts = ("python run_benchmarks.py", "jobkit run")
    for words in (shlex.split(line)[2:] for line in lines() if line.startswith(starts)):
        own = words[: words.index("--")] if "--" in words else words
        args = of_command("run").parse_args(own)
        if args.study == "mine.toml":
            continue
        names = ("gpus", "gpus_per_node", *(["launcher"] if own != words else []))
        given = {n: v for n in names if (v := getattr(args, n))}
        if own != words and not args.study:
            study = Study.of_command(words[len(own) + 1 :], **given)
        else:
            study = Study.load(args.study or DEFAULT_STUDY, **given)
        with_words(study, args.sweep).expand()


def test_files_in_the_documents_are_what_their_text_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    page = TEXTS[ROOT / "docs" / "studies.md"]
    path.write_text(*blocks(page, "toml"))
    runs = len(Study.load(path).expand().runs)
    assert runs == 2 * 4 * 3 * 2 and f"plans {runs} runs" in page
    path.write_text(*blocks(TEXTS[ROOT / "docs" / "own-program.md"], "toml"))
    of_command = Study.load(path).expand().runs.values()
    assert len(of_command) == 2 * 4 * 3 and {s.scaling for s in of_command} == {"strong"}
    assert {s.arguments()[-1] for s in of_command} == {
        f"--gradient_accumulation_steps={n}" for n in (40, 20, 10, 5)
    }
    (code,) = blocks(README, "python")
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert all(hasattr(module, alias.name) for alias in node.names), node.module
