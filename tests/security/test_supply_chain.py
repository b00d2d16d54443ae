"""What `make` installs: the packages of a lock file, each file compared by its checksum."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.place import ROOT

LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = [f"3.{minor}" for minor in range(11, 15)]


def entries() -> list[tuple[Requirement, list[str]]]:
    """Each requirement of the lock, and its checksums."""
    joined = LOCK.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [(Requirement(x.split("--hash")[0]), re.findall(r"--hash=(\S+)", x)) for x in lines]


def test_every_package_has_one_version_and_checksums() -> None:
    found = entries()
    assert len(found) > 30
    for requirement, hashes in found:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", h) for h in hashes), requirement
    # Neither the host of a registry nor a path of the machine on which it was made.
    assert "/" not in LOCK and "--index" not in LOCK and "--find-links" not in LOCK


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_is_what_the_project_asks_for(python: str) -> None:
    """On each Python; the build backend, with which the project is installed, included."""
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    here |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    pinned = {
        canonicalize_name(r.name): str(r.specifier).removeprefix("==")
        for r, _ in entries()
        if r.marker is None or r.marker.evaluate(here)
    }
    project = PROJECT["project"]
    asked = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    asked += [text for extra in project["optional-dependencies"].values() for text in extra]
    for wanted in map(Requirement, asked):
        if wanted.name != "jobkit":
            assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), wanted
