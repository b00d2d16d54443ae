"""The Python of which `make` makes .venv, chosen among stand-ins; nothing is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.place import ROOT, script

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


@pytest.mark.needs("make")
@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3": 11, "python3.13": 13}, "python3"),  # the user's own, if it will do
        ({"python3": 10, "python3.12": 12}, "python3.12"),
        ({"python3": 15, "python3.12": 12}, "python3.12"),  # PyTorch may have none for 3.15
        ({"python3": 10}, ""),
    ],
)
def test_the_python_that_is_chosen_and_what_it_installs(tmp_path: Path, pythons, chosen) -> None:
    """Packages with their checksums; none that will do is one line."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("make", "mkdir", "chmod", "rm", "sed", "touch"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    for name, minor in pythons.items():
        script(tmp_path / name, STAND_IN.format(python=sys.executable, minor=minor))
    env = {"PATH": str(tmp_path)}
    words = [tmp_path / "make", "venv"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    if not chosen:
        assert done.returncode == 2 and "jobkit needs Python 3.11 or newer" in done.stderr
        return
    assert (tmp_path / "chosen").read_text() == f"{chosen} -m venv .venv\n", done.stderr
    first, packages, project = (tmp_path / "installed").read_text().splitlines()
    assert "--require-hashes --requirement .venv/uv.lock" in first
    assert (tmp_path / ".venv/uv.lock").read_text().startswith("uv==")
    assert "--require-hashes --requirement requirements.lock" in packages
    assert "--no-deps --no-build-isolation --editable ." in project
