"""Install the Debian packages, where that may be done without asking."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from minicluster.errors import ClusterError, UsageError
from minicluster.machine import PACKAGES, command, install_line, missing


def may_install() -> bool:
    """Root may, and so may a CI job; nobody else's machine is changed unasked."""
    return os.geteuid() == 0 or bool(os.environ.get("CI"))


def install(absent: list[str], say: Callable[[str], None]) -> int:
    """Run the install command; UsageError, with the command, where that may not be done here."""
    if not absent:
        say(f"installed already: {', '.join(PACKAGES)}")
        return 0
    line = install_line(absent)
    if not may_install():
        raise UsageError(f"installing needs root; run:\n  {line}")
    say(f"running: {line}")
    sudo = [] if os.geteuid() == 0 else [command("sudo"), "--non-interactive"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *absent]):
        done = subprocess.run(
            [*sudo, command("apt-get"), "--quiet", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode and words != ["update"]:  # the lists that are there may be enough
            raise ClusterError(f"apt-get failed:\n{done.stdout[-2000:]}")
    if still := missing(absent):
        raise ClusterError(f"installed, but still without their commands: {', '.join(still)}")
    say("installed")
    return 0
