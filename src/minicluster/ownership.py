"""Whose a cluster's folder is: what lies in it is executed, by root where root made it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from minicluster.errors import UsageError


def check(root: Path, reading: bool = False) -> None:
    """Raise UsageError where somebody else owns a folder, may write into it, or exchange it.

    reading: root's own is fine too. Above it lie folders that nobody else may write to, but those
    in which each removes only what is their own (/tmp).
    """
    check_entry(root, reading)
    trusted = {0, os.geteuid(), int(os.environ.get("SUDO_UID", "0"))}
    for above in root.absolute().parents:
        status = above.stat()
        shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if shared or status.st_uid not in trusted:
            raise UsageError(
                f"--dir {root}: others may rename what lies in {above}; choose another place"
            )


def check_entry(path: Path, reading: bool = False) -> None:
    """Raise UsageError for a link, and for what others own or may write to."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"--dir: {path} is a link; remove it, or choose another folder")
    if status.st_uid not in ({0, os.geteuid()} if reading else {os.geteuid()}):
        raise UsageError(
            f"--dir: {path} belongs to user id {status.st_uid}; choose another, or run it as them"
        )
    if status.st_mode & 0o022:
        raise UsageError(f"--dir: others may write to {path}; say chmod go-w {path}")
