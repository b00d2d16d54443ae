"""Completion in the shell: as the parsers are, and without any program started."""

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from support.generated_completion import FILE, ROOT, parsers, script
from support.parsers import OWN_OF_RUN_SH

BASH = shutil.which("bash") or "bash"
ASK = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _jobkit; echo "${COMPREPLY[*]}"'


def complete(*words: str, cwd: Path = ROOT, shell: str = BASH, ask: str = ASK) -> list[str]:
    """What is offered for the last of the words; no program can be found meanwhile."""
    done = subprocess.run(
        [shell, "-c", ask, str(FILE), *words],
        cwd=cwd, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_the_file_is_made_from_the_parsers() -> None:
    assert FILE.read_text() == script(), "run: make docs"


def test_every_option_is_offered() -> None:
    for command, parser in parsers():
        program, *rest = command.split()
        line = {"run.sh": ["bash", "run.sh"], "minicluster": ["hpc/minicluster", *rest]}
        offered = complete(*line.get(program, ["python", "-m", "jobkit", command]), "--")
        shown = (a for a in parser._actions if a.help != argparse.SUPPRESS)
        wanted = {option for a in shown for option in a.option_strings if option[:2] == "--"}
        assert set(offered) == wanted | (OWN_OF_RUN_SH if program == "run.sh" else set()), command


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["jobkit", "step"], ["step-model"]),
        (["python", "-m", "jobkit", "st"], ["status", "step-model"]),
        (["sbatch", "--nodes=2", "run.sh", "--strategy", "f"], ["fsdp"]),
        (["bash", "run.sh", "--precision", "=", "b"], ["bf16"]),
        (["./run_benchmarks.py", "--strategies", "ddp", "f"], ["fsdp"]),
        (["./run_benchmarks.py", "--study", "d"], ["demo"]),
        (["./run_benchmarks.py", "--precision", "fp32", "b"], []),
        (["hpc/minicluster", "k"], ["kill"]),
        (["./plot_results.sh", "--fore"], ["--forecast"]),
        (["python", "other.py", "--"], []),
    ],
)
def test_what_is_offered(words: list[str], offered: list[str]) -> None:
    assert complete(*words) == offered


def test_planned_studies_are_offered(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "plan.json").touch()
    (tmp_path / "logs" / "single").mkdir()
    assert complete("jobkit", "status", "", cwd=tmp_path) == ["mine", "other"]


@pytest.mark.needs("zsh")
def test_zsh_takes_the_file() -> None:
    zsh = shutil.which("zsh")
    ask = 'autoload -U compinit bashcompinit; compinit -D; bashcompinit; source "$0"; '
    ask += "print -r -- ${(k)_comps[(R)*_jobkit*]}"
    assert {"jobkit", "run.sh", "run_benchmarks.py"} <= set(complete(shell=zsh, ask=ask))
