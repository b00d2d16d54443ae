"""The Debian packages of the tests: `make packages` installs them, as root or in CI, in one go.

A test without its package is skipped and says the command; with CI set it fails. It never installs.
"""

import os
import shutil
import subprocess
import sys
from typing import NoReturn

from minicluster import machine

# Besides those of the minicluster; one of the commands is enough.
TOOLS = {
    "chromium": ("chromium", "google-chrome"),
    "cmake": ("cmake",),
    "g++": ("g++",),
    "make": ("make",),
    "python3": ("/usr/bin/python3", "/usr/local/bin/python3"),  # one that every user may run
    "shellcheck": ("shellcheck",),
}


def program(package: str) -> str | None:
    found = (shutil.which(name, path=machine.search_path()) for name in TOOLS[package])
    return next((path for path in found if path), None)


def missing(names: list[str]) -> list[str]:
    tools = [name for name in names if name in TOOLS and not program(name)]
    path = machine.search_path()

    def has(package: str) -> bool:
        return all(shutil.which(name, path=path) for name in machine.PACKAGES[package])

    return [name for name in names if name not in TOOLS and not has(name)] + tools


def require(*names: str) -> None:
    if absent := missing(list(names)):
        unavailable(f"{', '.join(absent)} absent: make packages, or {machine.install_line(absent)}")


def unavailable(lack: str) -> NoReturn:
    """What a test needs cannot be had: a failure in CI, where it must be; else a skip."""
    import pytest  # `make packages` runs before it is installed

    if os.environ.get("CI"):
        pytest.fail(f"CI is set, and {lack}", pytrace=False)
    pytest.skip(lack)


def main() -> int:
    """Install what is absent, where that may be done unasked; else say how, and go on."""
    every = [*machine.PACKAGES, *TOOLS]
    if not (absent := missing(every)):
        return 0
    root = os.geteuid() == 0
    if not root and not os.environ.get("CI"):  # nobody else's machine is changed unasked
        print(f"tests will be skipped without {', '.join(absent)}: {machine.install_line(absent)}")
        return 0
    print(f"running: {machine.install_line(absent)}", flush=True)
    apt_get = [*([] if root else ["sudo", "--non-interactive"]), machine.command("apt-get"), "-q"]
    apt_get += ["-o", "DPkg::Lock::Timeout=600"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *absent]):
        done = subprocess.run([*apt_get, *words], env=env, capture_output=True, text=True)
    if still := missing(every):
        print(f"{done.stdout[-2000:]}without {', '.join(still)}", file=sys.stderr)
    return 1 if still and os.environ.get("CI") else 0


if __name__ == "__main__":
    sys.exit(main())
