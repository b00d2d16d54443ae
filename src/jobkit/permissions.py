"""Who may write into the folders under logs/."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobkit.errors import UsageError


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Make all new files of this process and its children writable by their owner only.

    A study's folder holds what jobs execute: whoever can write into it acts as its owner.
    """
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


def own_folder(folder: Path) -> Path:
    """Make a folder that only its owner can enter, and return it; UsageError where it is not ours.

    One that was there already is closed too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise UsageError(f"{folder} is somebody else's or a link: remove it")
    folder.chmod(0o700)
    return folder


def other_writers(folder: Path) -> str:
    """Who else may write into a folder: everybody, its group, its owner, or nobody.

    Nobody is the empty text, also for a folder that does not exist.
    """
    try:
        status = folder.stat()
    except OSError:
        return ""
    if status.st_mode & 0o002:
        return "everybody"
    if status.st_mode & 0o020:
        return "its group"
    return "" if status.st_uid in (0, os.geteuid()) else "its owner, who is somebody else"
