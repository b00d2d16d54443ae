"""The notebook: made from its source, executed from the first cell to the last."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import needs
from support.place import ROOT

SOURCE = ROOT / "docs" / "notebooks" / "distributed_training.py"


def test_what_the_notebook_uses_is_there() -> None:
    nodes, used = [*ast.walk(ast.parse(SOURCE.read_text()))], {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(ast.unparse(node), used)  # an ImportError names what is absent
    calls = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    of_scripts = [
        (n.value.id, n.attr) for n in calls if n.value.id.startswith(("exercise_", "schedule"))
    ]
    assert len(of_scripts) > 3
    assert [name for name in of_scripts if not hasattr(used[name[0]], name[1])] == []


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
    """In a process with folders of its own, so that nothing is read from or left in the user's."""
    if not all(importlib.util.find_spec(name) for name in ("jupytext", "nbclient", "ipykernel")):
        needs.unavailable("the extra 'course' is not installed (make venv)")
    program = (
        "import jupytext, nbclient, sys\n"
        "notebook = jupytext.read(sys.argv[1])\n"
        "nbclient.NotebookClient(notebook, timeout=3600, kernel_name='python3').execute()\n"
        "texts = [o.get('text', '') for c in notebook.cells for o in c.get('outputs', [])]\n"
        "print(''.join(texts))\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    environ |= {name: str(tmp_path) for name in ("HOME", "TMPDIR", "NOTEBOOK_PICTURES")}
    environ |= {"PYTHONPATH": str(ROOT / "src"), "JUPYTER_PLATFORM_DIRS": "1", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(SOURCE)],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FULL_SHARD" in done.stdout and "52.2" in done.stdout
    assert re.search(r"^mp on 2 ranks: \d+ images/s$", done.stdout, re.MULTILINE)
    rates = re.findall(r"(\w+): \d+ images/s, \d+ MiB, efficiency ([\d.]+)", done.stdout)
    assert [name for name, _ in rates] == ["single", "dp", "ddp", "fsdp"]
    for name in ("pipeline.png", "comparison.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
