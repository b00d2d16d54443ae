"""A current folder of somebody else's: nothing in it is imported, but the model that is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.place import ROOT

TRAPS = ("rich", "torch", "torchvision", "submitit", "pandas", "json", "tomllib", "mine")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with modules that leave a trace where they are imported."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in TRAPS:
        trace = tmp_path / f"imported-{name}"
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'w')\n")
    return folder


def traces(folder: Path) -> list[str]:
    return sorted(p.name.removeprefix("imported-") for p in folder.parent.glob("imported-*"))


@pytest.mark.parametrize("words", [["status"], ["--help"], ["cancel", "x"], ["memory", "--help"]])
def test_a_command_imports_nothing_from_there(theirs: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "jobkit", *words]
    subprocess.run(command, cwd=theirs, capture_output=True, timeout=400)
    assert traces(theirs) == []


def test_run_sh_imports_nothing_from_there(theirs: Path) -> None:
    command = ["bash", str(ROOT / "run.sh"), "--check", "--dataset", "synthetic"]
    env = {**os.environ, "JOBKIT_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=theirs, env=env, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert traces(theirs) == []


def test_a_model_that_is_asked_for_is_imported_and_nothing_else(theirs: Path) -> None:
    (theirs / "mine.py").write_text(
        f"open({str(theirs.parent / 'imported-mine')!r}, 'w')\n"
        "import json, torch\nfrom torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))\n"
    )
    words = ["memory", "--model", "mine:make", "--strategy", "ddp", "--gpus", "2"]
    command = [sys.executable, "-m", "jobkit", *words]
    done = subprocess.run(command, cwd=theirs, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert traces(theirs) == ["mine"]
