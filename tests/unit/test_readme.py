"""What the README promises is there: links, files, commands, columns."""

import re
import shlex
from pathlib import Path

import pytest

from jobkit.__main__ import COMMANDS
from jobkit.analysis.tables.columns import COMM, EPOCHS, FORECAST, RESULTS, SCALING, markdown
from jobkit.launch.cli import parser as bench_parser
from jobkit.payload.main import parser as payload_parser
from jobkit.spec.plan import Study
from support.place import ROOT

README = (ROOT / "README.md").read_text()
LINES = [line.strip() for line in re.findall(r"^    (\S.*)$", README, re.MULTILINE)]


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
    assert "\n## Columns\n" in README  # what the link within the page leads to


def test_columns_are_those_of_the_collector() -> None:
    assert markdown(RESULTS) in README
    assert markdown(EPOCHS) in README
    assert markdown(SCALING) in README
    assert markdown(FORECAST) in README
    assert markdown(COMM) in README


def payload_words(line: str) -> list[str]:
    words = shlex.split(line.split("run.sh", 1)[1])
    own = {"--nproc-per-node": 2, "--preflight": 1, "--spec": 2}
    while words and words[0] in own:
        words = words[own[words[0]] :]
    return words


@pytest.mark.parametrize("line", [x for x in LINES if "run.sh -" in x])
def test_lines_for_run_sh_are_taken(line: str) -> None:
    payload_parser().parse_args(payload_words(line))


@pytest.mark.parametrize("line", [x for x in LINES if x.startswith("python run_benchmarks.py")])
def test_lines_for_run_benchmarks_are_taken(line: str) -> None:
    args = bench_parser().parse_args(shlex.split(line)[2:])
    Study.load(args.study, gpus=args.gpus, gpus_per_node=args.gpus_per_node).expand()


def test_commands_exist() -> None:
    named = set(re.findall(r"python -m jobkit ([a-z-]+)", README))
    assert named and named <= set(COMMANDS)


def test_the_study_in_the_readme_is_a_study(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert len(Study.load(path).expand().runs) == 2 * 4 * 3 * 2


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"(?:`|^    )make ([a-z]+)", README, re.MULTILINE)
    assert "demo" in named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_file_that_the_readme_names_exists() -> None:
    named = set(
        re.findall(r"(?:\./)?((?:hpc/(?:sites/)?|tests/bench/)?[a-z_]+\.(?:sh|py|toml))\b", README)
    )
    left_by_runs = {"site.sh", "job.sh", "my.toml", "patches.py"}
    assert [n for n in named - left_by_runs if not (ROOT / n).exists()] == []
