"""Who may write into the folders under logs/, and whether a study holds links."""

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobkit.errors import UsageError

_MOST_LEVELS = 32  # of folders in a study


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
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        what = "is a link" if folder.is_symlink() else error.strerror
        raise UsageError(f"{folder} {what}: remove it") from None
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise UsageError(f"{folder} is somebody else's: remove it")
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return folder


def next_folder(parent: Path) -> Path:
    """A numbered folder that is not there yet, after all that are; it is not made.

    What is executed goes to a folder that did not exist before: nobody has left files in it.
    """
    names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    taken = [int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 10]
    return parent / str(max(taken, default=-1) + 1)


def other_writers(folder: Path) -> str:
    """Who else may write into a folder: everybody, its group, its owner, or nobody.

    Nobody is the empty text, also for a folder that does not exist.
    """
    try:
        return _others(folder.stat())
    except OSError:
        return ""


def _others(status: os.stat_result) -> str:
    """Who else may write to a file or folder; nobody is the empty text."""
    if status.st_mode & 0o002:
        return "everybody"
    if status.st_mode & 0o020 and not _is_private(status.st_gid):
        return "its group"
    return "" if status.st_uid in (0, os.geteuid()) else "its owner, who is somebody else"


def _is_private(gid: int) -> bool:
    """Whether a group is this user's own, as many systems make one for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def check_study(folder: Path, trust_group: bool = False) -> list[str]:
    """Check a study's folder before anything in it is executed or written through.

    Returns a note on others who may write there and are trusted. Raises UsageError for others who
    are not, in the study or in a folder above it; for a link; for what is no file or folder.
    """
    found = [
        (path, others, above)
        for above, paths in ((True, _ways(folder)), (False, _within(folder)))
        for path, status in paths
        if (others := _others(_unless_sticky(status) if above else status))
    ]
    everybody = [(p, above) for p, others, above in found if others == "everybody"]
    if everybody:
        path, above = everybody[0]
        fix = f"chmod go-w {_quoted(path)}" if above else f"chmod -R go-w {_quoted(folder)}"
        raise UsageError(
            f"{path}: world-writable, and jobs execute files in {folder}: run {fix}, "
            "or choose another folder for logs with JOBKIT_LOGS"
        )
    if not found:
        return []
    path, others, _ = found[0]
    note = f"{path}: writable by {others}, and jobs execute files in {folder}"
    if not trust_group:
        raise UsageError(
            f"{note}: run chmod -R go-w {_quoted(path)}, choose another folder for logs with "
            "JOBKIT_LOGS, or say --trust-group"
        )
    return [note]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _unless_sticky(status: os.stat_result) -> os.stat_result:
    """A folder's status, without the right to write where nobody can rename others' files."""
    if not status.st_mode & stat.S_ISVTX:
        return status
    return os.stat_result((status.st_mode & ~0o022, *status[1:]))


def _ways(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder above one, and every link on the way to it: whoever may exchange one of them
    puts another folder in its place.
    """
    todo, seen = [folder.absolute()], {folder.resolve()}
    while todo:
        path = todo.pop()
        for part in (path, *path.parents):
            if part in seen or not os.path.lexists(part):
                continue
            seen.add(part)
            status = part.lstat()
            if stat.S_ISLNK(status.st_mode):
                todo.append(Path(os.path.normpath(part.parent.resolve() / part.readlink())))
                # A link has no rights of its own: its owner and its folder's count.
                status = os.stat_result((status.st_mode & ~0o022, *status[1:]))
            yield part, status


def _within(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A folder and all in it. Raises UsageError for links, and for what is no file or folder."""
    todo = [(folder, 0)] if folder.is_dir() else []
    if todo:
        yield folder, folder.stat()
    while todo:
        parent, level = todo.pop()
        try:
            entries = list(os.scandir(parent))
        except OSError as error:
            raise UsageError(f"{parent}: {error.strerror}") from None
        if level > _MOST_LEVELS:
            raise UsageError(f"{parent}: folders in folders, {level} levels: this is no study")
        for entry in entries:
            path, status = Path(entry.path), entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                if level == 1 and entry.name == "slurm.log":  # only read, and made again
                    continue
                raise UsageError(f"{path} is a link, through which would be written: remove it")
            if stat.S_ISDIR(status.st_mode):
                todo.append((path, level + 1))
            elif not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{path} is neither a file nor a folder: remove it")
            yield path, status
