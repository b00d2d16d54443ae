"""Install the Debian packages, where that may be done without asking."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

from minicluster import locks
from minicluster.errors import ClusterError, UsageError
from minicluster.machine import command, install_line

WAIT_S = 600.0  # an upgrade of the whole system may be under way
_LOCKED = "Could not get lock"


def may_install() -> bool:
    """Root may, and so may a CI job; nobody else's machine is changed unasked."""
    return os.geteuid() == 0 or bool(os.environ.get("CI"))


def install(missing: Callable[[], list[str]], say: Callable[[str], None]) -> bool:
    """Install the packages that are missing; False when there were none.

    UsageError, with the command, where that may not be done here. Of several at once the first
    installs, and the others find that nothing is missing any more.
    """
    if not (absent := missing()):
        return False
    line = install_line(absent)
    if not may_install():
        raise UsageError(f"installing needs root; run:\n  {line}")
    with locks.waited("packages", WAIT_S):
        if not (absent := missing()):
            return True
        say(f"running: {install_line(absent)}")
        _apt_get("update")  # where that fails, the lists that are there may be enough
        done = _apt_get("install", "-y", "--no-install-recommends", *absent)
        if done.returncode:
            raise ClusterError(f"apt-get failed:\n{done.stdout[-2000:]}")
        if still := missing():
            raise ClusterError(f"installed, but still without their commands: {', '.join(still)}")
        say("installed")
    return True


def _apt_get(*words: str) -> subprocess.CompletedProcess[str]:
    """Run apt-get, again while somebody else's apt-get or dpkg has one of their locks.

    Its own option for that, DPkg::Lock::Timeout, does not wait for the lock of the lists.
    """
    sudo = [] if os.geteuid() == 0 else [command("sudo"), "--non-interactive"]
    argv = [*sudo, command("apt-get"), "--quiet", *words]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    deadline = time.monotonic() + WAIT_S
    while True:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        locked = done.returncode and _LOCKED in done.stdout
        if not locked or time.monotonic() > deadline:
            return done
        time.sleep(1)
