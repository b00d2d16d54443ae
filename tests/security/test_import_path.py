"""A current folder of somebody else's: nothing in it is imported, but the model that is named."""

import os
import subprocess
import sys

import pytest

from support.place import ROOT

TRAPS = ("rich", "torch", "torchvision", "submitit", "pandas", "json", "tomllib", "mine")
PYTHON = f"{sys.executable} -m jobkit"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (f"{PYTHON} status", []),
        (f"{PYTHON} collect nosuch", []),
        (f"bash {ROOT}/run.sh --check --dataset synthetic", []),
        (f"{PYTHON} memory --model mine:make --strategy ddp --gpus 2", ["mine"]),
    ],
)
def test_nothing_is_imported_from_there_that_nobody_named(tmp_path, words, found) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in TRAPS:
        trace = tmp_path / f"imported-{name}"
        (theirs / f"{name}.py").write_text(f"open({str(trace)!r}, 'w')\n")
    with (theirs / "mine.py").open("a") as file:
        file.write("import json, torch\nfrom torch import nn\n")
        file.write("def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))\n")
    env = {**os.environ, "JOBKIT_PYTHON": sys.executable}
    done = subprocess.run(
        words.split(), cwd=theirs, env=env, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == (2 if words.endswith(("status", "nosuch")) else 0), done.stderr
    assert sorted(p.name.removeprefix("imported-") for p in tmp_path.glob("imp*")) == found
