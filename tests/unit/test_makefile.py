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


@pytest.mark.parametrize(
    ("pythons", "words", "chosen"),
    [
        ({"python3": 11, "python3.13": 13}, [], "python3"),  # the user's own, if it will do
        ({"python3": 10, "python3.11": 11, "python3.13": 13}, [], "python3.13"),  # else the newest
        ({"python3": SHIM, "python": SHIM, "python3.13": SHIM, "python3.11": 11}, [], "python3.11"),
        ({"python3": 15, "python3.12": 12}, [], "python3.12"),  # PyTorch may have none for 3.15
        ({"python3": 15, "python3.14": SHIM}, [], "python3"),  # but it is the only one
        ({"python3": 12, "mine": 11}, ["PYTHON=mine"], "mine"),
        ({"python3": 12}, ["LOCK="], "python3"),
        ({"python3": 12, "old": 9}, ["PYTHON=old"], ""),
    ],
)
def test_the_python_that_is_chosen_and_what_it_installs(tmp_path: Path, pythons, words, chosen):
    """Packages with their checksums, unless LOCK is empty; none that will do is one line."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("make", "mkdir", "chmod", "rm", "sed", "touch"):
        (tools / name).symlink_to(str(shutil.which(name)))
    for name, kind in pythons.items():
        text = STAND_IN.format(python=sys.executable, minor=kind) if isinstance(kind, int) else kind
        script(tools / name, text)
    done = subprocess.run(
        [tools / "make", "venv", *words],
        cwd=tmp_path, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if not chosen:
        said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
        assert done.returncode == 2 and len(said) == 1, done.stderr
        assert said[0].startswith("jobkit needs Python 3.11 or newer")
        return
    assert done.returncode == 0 and "pyenv" not in done.stderr, done.stderr
    assert (tmp_path / "chosen").read_text() == f"{chosen} -m venv .venv\n"
    first, *called = (tmp_path / "installed").read_text().splitlines()
    if words == ["LOCK="]:
        assert not called and first.endswith("--editable .[all,export,dev,adapters,course,site]")
        return
    assert "--require-hashes --requirement .venv/uv.lock" in first
    assert (tmp_path / ".venv/uv.lock").read_text().startswith("uv==")
    packages, project = called
    assert "--require-hashes --requirement requirements.lock" in packages
    assert "--no-deps --no-build-isolation --editable ." in project
