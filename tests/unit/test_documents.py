"""What README.md and docs/ promise is there: links, files, commands, options, tables, words."""

import argparse
import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from jobkit.errors import Exit
from jobkit.launch.cli import DEFAULT_STUDY
from jobkit.spec.grid_words import with_words
from jobkit.spec.plan import Study
from jobkit.spec.runspec import STRATEGIES
from support.generated_docs import PAGES, ROOT, TABLES, type_of, with_tables
from support.parsers import (
    COMMANDS,
    MINICLUSTER,
    OWN_OF_RUN_SH,
    RUN_SH,
    VALUED_OF_RUN_SH,
    of_command,
    options,
    parser_of,
)

CHAPTERS = sorted((ROOT / "docs" / "exercises").glob("*.md"))
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *CHAPTERS]
README = (ROOT / "README.md").read_text()
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Options of run.sh itself: the number of words of each.
OWN = {option: 1 + (option in VALUED_OF_RUN_SH) for option in OWN_OF_RUN_SH}
# Of Slurm's commands and of containers: named in the text, and not jobkit's.
OF_OTHERS = {"--kill-on-bad-exit=1", "--environment=", "--container-image=", "--requeue", "--mem"}
OF_OTHERS |= {
    "--nv",
    "--rocm",
    "--gpu-bind=none",
    "--gres=gpu:4",
    "--gpus-per-task=1",
    "--gpus-per-node=4",
    "--ntasks",
}
OF_OTHERS |= {"--nodes=2", "--world-sizes"}  # of sbatch; of verify, which imports torch
OF_OTHERS |= {
    "--signal=USR2",
    "--signal=TERM",
    "--signal",
    "--signal=USR2@60",
    "--signal=CONT@1",
    "--cpus-per-task",
    "--label",
}


def prose(text: str) -> str:
    """A page without its code blocks and generated tables."""
    text = re.sub(r"<!-- generated.*?<!-- end -->", "", text, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return [code for found, code in _FENCE.findall(text) if found == language]


def lines() -> list[str]:
    """Every command line of the documents."""
    code = "".join("".join(blocks(page.read_text(), "bash")) for page in DOCS)
    return list(dict.fromkeys(filter(None, code.splitlines())))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual viewers of Markdown make them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert set(re.findall(r"\]\((\S+\.md)\)", index)) == {p.name for p in PAGES} - {"README.md"}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_generated_tables_are_those_of_the_source(page: Path) -> None:
    text = page.read_text()
    assert with_tables(text) == text, "run: make docs"


def test_the_options_of_run_sh_are_all_explained() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (rows,) = re.findall(r"^\| option .*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    first = " ".join(row.split("|")[1] for row in rows.splitlines())
    also_the_trainings = {"--stop-signal"}
    assert set(re.findall(r"`(--[a-z-]+)", first)) == OWN_OF_RUN_SH | also_the_trainings


def test_every_table_of_the_source_is_in_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"<!-- generated: (.+?) -->", text)) == set(TABLES)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_lines_are_short(page: Path) -> None:
    long = [x for x in prose(page.read_text()).splitlines() if len(x) > 100 and x[0] != "|"]
    assert not long


def test_the_readme_is_an_overview() -> None:
    assert len(README.splitlines()) <= 220


# Commands


def parse(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Parse the words of a command; what comes after -- is for another program."""
    parser.parse_args(words[: words.index("--")] if "--" in words else words)


def check_run_sh(words: list[str]) -> None:
    """The words after run.sh: its own options anywhere, the rest for the training."""
    comm, rest = "--comm" in words, words
    kept: list[str] = []
    while rest:
        taken = OWN.get(rest[0], 0)
        kept, rest = kept + ([] if taken else rest[:1]), rest[taken or 1 :]
    parse(of_command("comm") if comm else parser_of(*RUN_SH), kept)


def check_bench(words: list[str]) -> None:
    """A benchmark of the tests: the file is there and knows the options."""
    source = (ROOT / words[0]).read_text()
    assert [w for w in words if w.startswith("--") and f'"{w}"' not in source] == []


def check_make(words: list[str]) -> None:
    """The targets are in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{word}:.*##", makefile, re.MULTILINE) for word in words)


SHELL = {"source", "export", "cp", "mkdir", "pip", "$EDITOR", "sinfo", "eval"}
DOORS = {"run_benchmarks.py": "run", "collect_results.py": "collect"}
DOORS |= {"plot_results.py": "plot", "./plot_results.sh": "plot"}


@pytest.mark.parametrize("line", lines())
def test_commands_are_taken(line: str) -> None:
    """Each command line of the documents is parsed by the command that it calls."""
    words = shlex.split(line.replace("$(jobkit --prefix)/", ""))
    program, *rest = words[1:] if words[0] == "python" else words
    if "run.sh" in words:
        check_run_sh(words[words.index("run.sh") + 1 :])
    elif script := next((w for w in words if re.fullmatch(r"hpc/train\w*\.sh", w)), None):
        assert (ROOT / script).exists()
        check_run_sh(words[words.index(script) + 1 :])
    elif "hpc/comm.sh" in words:
        check_run_sh(["--comm", *words[words.index("hpc/comm.sh") + 1 :]])
    elif [program, *rest[:1]] == ["-m", "jobkit"]:
        parse(of_command(rest[1]), rest[2:])
    elif program == "jobkit":
        parse(of_command(rest[0]), rest[1:])
    elif program.startswith("tests/bench/"):
        check_bench([program, *rest])
    elif program in DOORS:
        parse(of_command(DOORS[program]), rest)
    elif program == "hpc/minicluster":
        parse(parser_of(*MINICLUSTER), rest)
    elif program == "make":
        check_make(rest)
    else:
        assert program in SHELL, f"no check for this line: {line}"


def test_studies_of_the_documents_expand() -> None:
    found = [shlex.split(line)[2:] for line in lines() if "run_benchmarks.py" in line]
    assert found
    for words in found:
        args = of_command("run").parse_args(words[: words.index("--")] if "--" in words else words)
        given = {"gpus": args.gpus, "gpus_per_node": args.gpus_per_node}
        given = {k: v for k, v in given.items() if v}
        if "--" in words and not args.study:
            given |= {"launcher": args.launcher} if args.launcher else {}
            study = Study.of_command(words[words.index("--") + 1 :], **given)
        elif args.study == "mine.toml":
            continue
        else:
            study = Study.load(args.study or DEFAULT_STUDY, **given)
        with_words(study, args.sweep, args.parameter).expand()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_options_and_commands_in_the_text_exist(page: Path) -> None:
    text = prose(page.read_text())
    named = {w for code in re.findall(r"`([^`]+)`", text) for w in code.split() if w[:2] == "--"}
    known = {"--", *OWN, *OF_OTHERS, "--prefix"}
    known |= {"--rounds", "--studies", "--only", "--keep", "--launchers"}  # of benchmarks
    parsers = [of_command(name) for name in COMMANDS if name != "verify"]  # it imports torch
    for parser in (*parsers, parser_of(*RUN_SH), parser_of(*MINICLUSTER)):
        known |= options(parser)
    assert named - known == set()
    assert set(re.findall(r"python -m jobkit ([a-z][a-z0-9-]+)", page.read_text())) <= set(COMMANDS)


def first_cells(text: str, head: str) -> list[str]:
    """The code words in the first cells of the table with this head."""
    (rows,) = re.findall(rf"^\| {re.escape(head)}.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return re.findall(r"^\| `([^`]+)`", rows, re.MULTILINE)


def test_the_readme_has_every_command_and_strategy() -> None:
    assert sorted(first_cells(README, "`python -m jobkit ...`")) == sorted(COMMANDS)
    assert sorted(first_cells(README, "`--strategy`")) == sorted(STRATEGIES)


def test_exit_codes_are_all_explained() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text().split("## Exit codes")[1].split("## ")[0]
    codes = re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)
    assert [int(code) for cell in codes for code in cell.split(",")] == [int(c) for c in Exit]


# Files


def test_the_study_in_the_documents_is_a_study(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "studies.md").read_text()
    (text,) = blocks(page, "toml")
    path = tmp_path / "mine.toml"
    path.write_text(text)
    runs = len(Study.load(path).expand().runs)
    assert runs == 2 * 4 * 3 * 2 and f"plans {runs} runs" in page


def test_the_study_of_a_command_in_the_documents_is_a_study(tmp_path: Path) -> None:
    (text,) = blocks((ROOT / "docs" / "own-program.md").read_text(), "toml")
    path = tmp_path / "mine.toml"
    path.write_text(text)
    runs = Study.load(path).expand().runs.values()
    assert len(runs) == 2 * 4 * 3 and {s.scaling for s in runs} == {"strong"}
    assert {s.arguments()[-1] for s in runs} == {
        f"--gradient_accumulation_steps={n}" for n in (40, 20, 10, 5)
    }


def test_python_of_the_readme_imports_what_is_there() -> None:
    (code,) = blocks(README, "python")
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    assert found
    for node in found:
        module = importlib.import_module(node.module or "")
        assert all(hasattr(module, alias.name) for alias in node.names), node.module


def test_targets_of_make_exist() -> None:
    for page in DOCS:
        check_make(re.findall(r"`make ([a-z]+)`", page.read_text()))


def test_every_file_that_is_named_exists() -> None:
    text = "".join(page.read_text() for page in DOCS)
    folders = r"(?:\./)?((?:hpc/(?:sites/)?|tests/(?:bench|unit)/)?[a-z_]+\.(?:sh|py|toml))\b"
    named = set(re.findall(rf"(?<![/\w]){folders}", text))
    left_by_runs = {
        "site.sh",
        "job.sh",
        "mine.toml",
        "patches.py",
        "waiting.py",
        "train.py",
        "meter.py",
        "hpc/sites/mine.toml",
    }
    others = {
        "example.toml",
        "__init__.py",
        "sitecustomize.py",
    }  # in a folder that the text names before
    others |= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert [n for n in named - left_by_runs - others if not (ROOT / n).exists()] == []


def test_the_architecture_has_every_room() -> None:
    """Every folder of the source has its line, and every line its folder."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    told = {name.rstrip("/") for name in first_cells(page, "folder of `src/`")} - {"jobkit/*.py"}
    source = ROOT / "src"
    there = {str(p.parent.relative_to(source)) for p in source.glob("**/*.py")}
    nested = "jobkit/checks/"  # told by the line of their folder
    assert told == {name for name in there if not name.startswith(nested)} - {"jobkit"}


def test_paths_of_the_source_in_the_documents_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"`(src/[\w/.]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


# The [METRIC] line


def test_types_of_fields_are_those_of_real_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobkit.analysis.collect.records import read_run
    from support.fake_study import make_plan, whole_run

    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    plan = make_plan(strategies=("ddp",), gpus=(2,))
    (run_id,) = plan.runs
    whole_run(plan, run_id)
    python = {"integer": int, "text": str, "object": dict, "true or false": bool}
    common = {"v", "kind", "study", "run_id", "attempt", "rank", "seq", "t", "parts", "part"}
    seen = 0
    for record in read_run(plan.paths.run(run_id), run_id).records:
        for name, value in record.items():
            if name not in common and value is not None:
                assert isinstance(value, python.get(type_of(name), int | float)), name
                seen += 1
    assert seen > 30


def test_lines_of_another_program_become_a_whole_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of the specification, at one size and at two."""
    from jobkit.analysis.collect.results import collect

    page = (ROOT / "docs" / "metric-line.md").read_text()
    (log,) = re.findall(r"<!-- example: foreign -->\n```text\n(.*?)```", page, re.DOTALL)
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    one = log.replace('"ranks_per_node": 2', '"ranks_per_node": 1')
    one = one.replace('"world_size": 2', '"world_size": 1').replace("=16", "=8")
    for name, text in (("a", one), ("b", log)):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "train.log").write_text(text)
    results = collect("mine")
    assert results.runs["status"].tolist() == ["ok", "ok"]
    assert results.scaling["world_size"].tolist() == [1, 2]
    assert results.scaling["speed_up"].tolist() == pytest.approx([1, 1683.1 / 883.1])


# Words


BANNED = r"foretold|foretell|fullest|strikes\b|\bwish|\bdesk\b|\banew\b|the truth\b|hopeful"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_the_text_uses_the_terms_of_the_field(page: Path) -> None:
    assert re.findall(BANNED, prose(page.read_text())) == []
