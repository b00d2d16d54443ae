"""Ends the clusters in a folder once the tests that own it are gone, however they ended.

Started with the folder; its standard input is a pipe that only the tests hold open.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

DOOR = Path(__file__).resolve().parents[2] / "hpc" / "minicluster"
PATIENCE_S = 300.0


def clear(folder: Path) -> None:
    """Take down the clusters in the folder, and delete it; it stays while an `up` is at work."""
    states = list(folder.rglob("minicluster.json"))
    done = [
        subprocess.run([sys.executable, DOOR, "down", "--dir", state.parent], check=False)
        for state in states
    ]
    if not any(one.returncode for one in done):
        shutil.rmtree(folder)


def main(folder: Path) -> None:
    """Wait for the end of the tests, then clear; again while an `up` goes on without them."""
    sys.stdin.read()
    deadline = time.monotonic() + PATIENCE_S
    while folder.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # the folder may change under us
            clear(folder)
        time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
