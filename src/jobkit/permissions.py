"""Who may write into the folders under logs/."""

import contextlib
import grp
import os
import pwd
import re
import shlex
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.files import file_names

_MAY = " may write there, and so change what the jobs execute"


@contextlib.contextmanager
def closed_to_others() -> Iterator[None]:
    """Make new files of this process and its children writable by their owner only, meanwhile.

    A study's folder holds what jobs execute: whoever can write into it acts as its owner.
    """
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner can enter, and return it; UsageError where it is not ours.

    One that was there already is closed too.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        what = "a link" if folder.is_symlink() else "somebody else's, or a file"
        raise UsageError(f"{folder} is {what}: remove it")
    folder.chmod(0o700)  # it takes the rights of an inherited ACL away as well
    return folder


def next_folder(parent: Path) -> Path:
    """A numbered folder that is not there yet, after all that are; it is not made.

    What is executed goes to a folder that did not exist before: nobody has left files in it.
    """
    taken = [int(n) for n in file_names(parent) if re.fullmatch(r"[0-9]{1,9}", n)]
    return parent / str(max(taken, default=-1) + 1)


def other_writers(folder: Path) -> str:
    """Who else may write into a folder: everybody, its owner, its group, or "" for no one else."""
    try:
        status = folder.stat()
        # With an ACL the mode's bits of the group are the most that the named users have.
        has_acl = "system.posix_acl_access" in os.listxattr(folder)
    except OSError:
        return ""
    if status.st_mode & 0o002:
        return "everybody"
    if status.st_uid not in (0, os.geteuid()):
        return "its owner, another user,"
    shared = status.st_mode & 0o020 and (has_acl or not _is_private(status.st_gid))
    return "its group" if shared else ""


def _is_private(gid: int) -> bool:
    """Whether a group is this user's own, as many systems make one for each user."""
    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
        return group.gr_name == user and {*group.gr_mem} <= {user}
    return False


def check_study(folder: Path) -> list[str]:
    """Check a study's folder before anything in it is executed or written.

    Returns one note where a group may write there or above, as in a project's folder: its members
    are trusted. Raises UsageError where everybody may write, or another owns study, link or run.
    """
    mine = (0, os.geteuid())
    if folder.is_symlink() and folder.lstat().st_uid not in mine:
        raise UsageError(f"{folder} is somebody else's link: choose another name")
    real, notes = Path(os.path.realpath(folder)), []  # resolve() raises for a loop of links
    entries = os.scandir(real) if real.is_dir() else ()
    runs = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for path in (real, *runs):
        if (writers := other_writers(path)) not in ("", "its group"):
            chmod = f"run chmod o-w {shlex.quote(str(path))}"
            fix = chmod if path.stat().st_uid in mine else "choose another name"
            raise UsageError(f"{path}: {writers}{_MAY}: {fix}")
        notes += [f"{path}: {writers}{_MAY}"] if writers else []
    for path in real.parents:
        # In a sticky folder, as /tmp, nobody can rename what is not theirs.
        if (writers := other_writers(path)) and not path.stat().st_mode & stat.S_ISVTX:
            if writers == "everybody":
                raise UsageError(f"{path}: everybody{_MAY}: choose other logs with JOBKIT_LOGS")
            notes.append(f"{path}: {writers}{_MAY}")
    return notes[:1]


def keep_compiler_cache() -> None:
    """Give torch's compiler a cache folder that is this user's own, unless one is named.

    Its default is /tmp/torchinductor_USER, which anybody can make first, and it unpickles what lies
    there. Raises UsageError where somebody took the name of ours.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = private_folder(Path(tempfile.gettempdir()) / f"jobkit-{os.geteuid()}")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")
