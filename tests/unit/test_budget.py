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
def test_cheap():
    pass

def test_dear():
    import subprocess, sys, time
    begun = time.process_time()
    while time.process_time() - begun < 0.2: pass
    words = "import time\\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", words], check=True)
"""


def test_a_run_names_the_part_above_its_budget_and_fails_for_too_many_starts(tmp_path) -> None:
    """Each start of torch is one too many here: the run fails, and names the command."""
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(SESSION)
    (tmp_path / "tests" / "conftest.py").write_text(
        "from support import budget\n"
        "pytest_plugins = ['support.budget']\n"
        "budget.BUDGETS['unit'] = 0.45\n"
        "budget.TorchStarts.of = lambda *_: ['python train.py']\n"
    )
    support = str(Path(budget.__file__).parents[1])
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    words += ["-o", f"pythonpath={support}", "-n", "1"]

    def session(*more: str) -> tuple[int, str]:
        done = subprocess.run([*words, *more], cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout

    code, said = session("--max-torch-starts=0")
    assert code == 1 and "over its budget of 0.45 s" in said
    assert "FAILED: more than 0 starts" in said and "  python train.py" in said
    code, said = session("--max-torch-starts=1", "-k", "cheap")
    assert code == 0 and "over its budget" not in said
    assert "starts of Python that imported torch: 1\n" in said
