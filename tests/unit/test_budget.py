"""What a run of the tests says at its end: starts of torch, parts above their budget."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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
    assert not [*budget.SITE.glob(f"**/{starts.module}*")] and not starts.log.exists()


def test_a_part_above_its_budget_is_named_and_too_many_starts_fail(monkeypatch) -> None:
    """Each start of torch is one too many here: the run fails, and names the command."""
    monkeypatch.setattr(budget.TorchStarts, "install", lambda _: None)
    monkeypatch.setattr(budget.TorchStarts, "of", lambda *_: ["python train.py"])
    monkeypatch.setitem(budget.BUDGETS, "unit", 0.45)
    for max_starts, failed in ((0, True), (1, False), (None, False)):
        report = budget.Report(max_starts)
        report.cpu["unit"] = 0.6 if failed else 0.3
        session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
        report.pytest_sessionfinish(session)
        said = "\n".join(report.lines())
        report.pytest_unconfigure()
        assert session.exitstatus == failed
        assert ("over its budget of 0.45 s" in said) == failed
        assert ("FAILED: more than 0 starts" in said and "  python train.py" in said) == failed
        assert "starts of Python that imported torch: 1" in said


def test_the_time_of_children_counts(tmp_path: Path) -> None:
    before = budget.cpu_s()
    words = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", words], check=True)
    assert budget.cpu_s() - before > 0.3
