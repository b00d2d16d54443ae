"""The checks of the exercises: a right, an empty and wrong solutions, each run by two ranks."""

import importlib
import re
from pathlib import Path

import pytest

from jobkit.exercise.catalogue import EXERCISES
from jobkit.exercise.checks.judge import Remark
from support.exercise_solutions import RIGHT, WRONG, Wrong

pytestmark = pytest.mark.usefixtures("fork_server")
# What solves an exercise and is not in its skeleton: no check may name it.
SOLVING = ("set_epoch", "DistributedSampler", "barrier", "zero_grad", "no_grad", "all_reduce",
           "destroy_process_group", "init_process_group", "model.train()")  # fmt: skip


def remarks(number: str, path: Path) -> list[Remark]:
    module = importlib.import_module(f"jobkit.exercise.checks.{EXERCISES[number].check}")
    found: list[Remark] = module.run(str(path))
    return found


def mistakes(number: str, source: str, folder: Path) -> list[str]:
    path = folder / "mine.py"
    path.write_text(source)
    return [each.text for each in remarks(number, path) if not each.ok]


@pytest.mark.parametrize("number", RIGHT)
def test_a_right_solution_passes(number: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RIGHT[number])
    found = remarks(number, path)
    assert len(found) >= 4 and [each.text for each in found if not each.ok] == []


@pytest.mark.parametrize("number", RIGHT)
def test_a_skeleton_is_valid_python_and_fails(number: str) -> None:
    (found,) = remarks(number, EXERCISES[number].skeleton)
    assert not found.ok and re.search(r"\w+\(\) is not completed, line \d+", found.text)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{w.number} {w.name}")
def test_a_mistake_is_named_and_not_solved(wrong: Wrong, tmp_path: Path) -> None:
    said = "\n".join(mistakes(wrong.number, wrong.source(), tmp_path))
    assert wrong.said in said
    assert [word for word in SOLVING if word in said] == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def main(tools, strategy, train=None:\n", "SyntaxError"),
        ("import a_package_that_is_not_there", "No module named 'a_package_that_is_not_there'"),
        ("main = 3", "the file has no function main()"),
        ("exit(3)", "SystemExit: 3"),
        ("import os\nos._exit(0)", "ended without a result"),
    ],
)
def test_a_file_that_cannot_be_run_is_one_remark(source: str, said: str, tmp_path: Path) -> None:
    (text,) = mistakes("5.1", source, tmp_path)
    assert said in text
