"""What every command does before its own work."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit import entry
from support.place import ROOT


def test_a_missing_package_is_one_line_that_says_what_to_do(capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "needs.py").write_text("def main(argv):\n    import surely_not_installed.deep\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert entry.run("needs", "main", []) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "'surely_not_installed'" in error and "make venv" in error
    with pytest.raises(ModuleNotFoundError):  # a fault of our own is not hidden
        entry.run("jobkit.no_such_module", "main", [])


def test_an_old_python_is_told_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr(entry, "OLDEST", (99, 0))
    assert entry.run("jobkit.analysis.cli", "collect_main", ["--help"]) == 2
    assert "Python 99.0 or newer is needed" in capsys.readouterr().err
    # No f-strings, no walrus: what Python 3.6 and older could not read.
    ast.parse(Path(entry.__file__).read_text(), feature_version=(3, 5))


def test_what_ends_a_command_is_one_line(capsys) -> None:
    for error, code, said in (
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 1, "jobkit: error: out of memory (see ulimit -v)\n"),
        (OSError(28, "No space left", "x"), 1, "jobkit: error: 'x': No space left\n"),
        (SystemExit(3), 3, ""),
    ):

        def main(_: list[str], error: BaseException = error) -> int:
            raise error

        assert entry.call(main, []) == code
        assert capsys.readouterr().err == said


def test_a_python_without_the_packages() -> None:
    # -S leaves site-packages out, as a system's own Python would.
    words = [sys.executable, "-S", "-I", str(ROOT / "collect_results.py"), "nothing"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "make venv" in done.stderr
