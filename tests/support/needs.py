"""The Debian packages that tests need: there, or installed where that may be done unasked.

With CI set a test fails where they cannot be had; elsewhere it is skipped with the reason.
"""

from __future__ import annotations

import functools
import os
import shutil
from typing import NoReturn

import pytest

from minicluster import machine
from minicluster import packages as product
from minicluster.errors import ClusterError

# Besides those of the minicluster; one of the commands is enough.
TOOLS = {
    "chromium": ("chromium", "google-chrome"),
    "cmake": ("cmake",),
    "g++": ("g++",),
    "make": ("make",),
    "python3": ("/usr/bin/python3", "/usr/local/bin/python3"),  # one that every user may run
    "shellcheck": ("shellcheck",),
    "zsh": ("zsh",),
}


def program(package: str) -> str | None:
    """The full path of the tool that the package is installed for."""
    found = (shutil.which(name, path=machine.search_path()) for name in TOOLS[package])
    return next((path for path in found if path), None)


def packages(*names: str) -> None:
    """The packages are installed, or the test ends here."""
    if lack := _lack(names):
        unavailable(lack)


def unavailable(lack: str) -> NoReturn:
    """What a test needs cannot be had: a failure in CI, where it must be; else a skip."""
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, and {lack}", pytrace=False)
    pytest.skip(lack)


@functools.cache
def _lack(names: tuple[str, ...]) -> str:
    """Why the packages cannot be had; empty when they are there. Tried once a process."""
    try:
        product.install(lambda: _missing(names), print)
    except ClusterError as error:
        return f"{', '.join(names)} cannot be had: {error}"
    return ""


def _missing(names: tuple[str, ...]) -> list[str]:
    tools = [name for name in names if name in TOOLS and not program(name)]
    return machine.missing([name for name in names if name not in TOOLS]) + tools
