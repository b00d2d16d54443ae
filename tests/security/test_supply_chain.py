"""What `make` installs: the packages of a lock file, each compared by its checksum."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.place import ROOT

LOCK = (ROOT / "requirements.lock").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = [f"3.{minor}" for minor in range(11, 15)]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_is_what_the_project_asks_for(python: str) -> None:
    """On each Python; the build backend, with which the project is installed, included."""
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    here |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    pinned = {
        canonicalize_name(r.name): str(r.specifier).removeprefix("==")
        for r in map(Requirement, re.findall(r"^\w.*?(?= *\\)", LOCK, re.MULTILINE))
        if r.marker is None or r.marker.evaluate(here)
    }
    # With these words pip and uv refuse a package that has no checksum in the lock.
    assert MAKEFILE.count("--requirement") == MAKEFILE.count("--require-hashes --requirement") == 3
    assert "/" not in LOCK, "the host of a registry, or a path of the machine on which it was made"
    project = PROJECT["project"]
    asked = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    asked += [text for extra in project["optional-dependencies"].values() for text in extra]
    for wanted in map(Requirement, asked):
        if wanted.name != "jobkit":
            assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), wanted
