"""What a run of the tests says at its end: starts of torch, parts above their budget."""

import subprocess
import sys
from pathlib import Path

from support import budget


def test_imports_of_torch_are_counted_in_every_process(tmp_path: Path) -> None:
    """Not a search for its file, nor a stand-in, nor a process that was forked after the import."""
    for file in ("real/torch/__init__.py", "stand-in/torch.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    real = f"import os, sys; sys.path.insert(0, {str(tmp_path / 'real')!r}); "
    starts = budget.TorchStarts()
    starts.install()
    try:
        for code in (
            real + "import torch",
            real + "import torch; os.fork() or __import__('torch')",
            real + "import importlib.util; importlib.util.find_spec('torch')",
            real.replace("/real", "/stand-in") + "import torch",
        ):
            subprocess.run([sys.executable, "-c", code], env={}, check=True)
        counted = starts.of(tmp_path / "real" / "torch")
    finally:
        starts.remove()
    assert len(counted) == 2 and counted[0].endswith("import torch"), counted
    assert not any(path.exists() for path in (*starts.files, starts.log))


SESSION = """
import subprocess, sys
def test_cheap(): pass
def test_dear():
    words = "import time\\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", words], check=True)
"""
CONFTEST = """
from support import budget
pytest_plugins = ["support.budget"]
budget.BUDGETS["unit"] = 0.45
budget.TorchStarts.of = lambda *_: ["python train.py"]
"""


def test_a_part_above_its_budget_is_named_and_too_many_starts_fail(tmp_path: Path) -> None:
    """Each start of torch is one too many here: the run fails, and names the command."""
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(SESSION)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-n", "1"]
    words += ["-o", f"pythonpath={Path(budget.__file__).parents[1]}"]
    for more, failed in (
        (["--max-torch-starts=0"], True),
        (["--max-torch-starts=1", "-kcheap"], False),
    ):
        done = subprocess.run([*words, *more], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == failed
        assert ("over its budget of 0.45 s" in done.stdout) == failed
        assert ("FAILED: more than 0 starts" in done.stdout) == failed
        assert ("  python train.py" in done.stdout) == failed
        assert "starts of Python that imported torch: 1\n" in done.stdout
