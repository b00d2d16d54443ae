"""The Python of which `make` makes .venv, chosen among stand-ins; nothing is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.place import ROOT, script

pytestmark = pytest.mark.needs("make")

# Says that it is of another version, where it is asked; makes a .venv whose python does nothing.
STAND_IN = """#!/bin/sh
case "$1" in
-c) exec {python} -c "import sys; sys.version_info = (3, {minor}, 0)
$2" "$3" ;;
esac
echo "${{0##*/}} $*" >>chosen
mkdir -p .venv/bin
printf '#!/bin/sh\\necho "$*" >>installed\\n' >.venv/bin/python
chmod +x .venv/bin/python
"""
SHIM = "#!/bin/sh\necho 'pyenv: python: command not found' >&2\nexit 127\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "requirements.lock"):
        (tmp_path / name).touch()
    (tmp_path / "bin").mkdir()
    for name in ("make", "mkdir", "chmod", "rm", "sed", "touch"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    return tmp_path


def place(folder: Path, **pythons: int | str) -> None:
    """Put stand-ins on PATH: the minor version of one that works, else its text."""
    for name, kind in pythons.items():
        text = STAND_IN.format(python=sys.executable, minor=kind) if isinstance(kind, int) else kind
        script(folder / "bin" / name.replace("_", "."), text)


def make(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [folder / "bin" / "make", "venv", *words],
        cwd=folder, env={"PATH": str(folder / "bin")}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3": 11, "python3_13": 13}, "python3"),  # the user's own, if it will do
        ({"python3": 10, "python3_11": 11, "python3_13": 13}, "python3.13"),  # else the newest
        ({"python3": SHIM, "python": SHIM, "python3_13": SHIM, "python3_11": 11}, "python3.11"),
        ({"python3": 15, "python3_12": 12}, "python3.12"),  # PyTorch may have none for 3.15
        ({"python3": 15, "python3_14": SHIM}, "python3"),  # but it is the only one
    ],
)
def test_the_python_that_is_chosen(folder, pythons, chosen) -> None:
    place(folder, **pythons)
    done = make(folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "chosen").read_text() == f"{chosen} -m venv .venv\n"
    assert "pyenv" not in done.stderr


def test_none_is_one_line_and_the_one_that_is_given_wins(folder: Path) -> None:
    place(folder, python3=10, python3_13=SHIM)
    done = make(folder)
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert said[0].startswith("jobkit needs Python 3.11 or newer")
    place(folder, python3=12, mine=11, old=9)
    done = make(folder, "PYTHON=old")
    assert done.returncode == 2 and "none of these is: old" in done.stderr
    assert make(folder, "PYTHON=mine").returncode == 0
    assert (folder / "chosen").read_text() == "mine -m venv .venv\n"


@pytest.mark.parametrize("words", [[], ["LOCK="]])
def test_make_compares_checksums_and_builds_with_what_they_cover(folder: Path, words) -> None:
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    place(folder, python3=12)
    done = make(folder, *words)
    assert done.returncode == 0, done.stderr
    first, *called = (folder / "installed").read_text().splitlines()
    if words:
        assert not called and first.endswith("--editable .[all,export,dev,adapters,course,site]")
        return
    assert "--require-hashes --requirement .venv/uv.lock" in first
    assert (folder / ".venv/uv.lock").read_text().startswith("uv==")
    packages, project = called
    assert "--require-hashes --requirement requirements.lock" in packages
    assert "--no-deps --no-build-isolation --editable ." in project
