"""What collecting made of each run, kept in the study's folder, so that the same is not read twice.

A run counts as the same where the sources of the reader, the plan, the state, Slurm's data and the
files are: of each file the size, the times of change, the inode and a checksum of its end. A run
that has not ended, that changed in the last seconds or that has a link in its folder is read each
time. The file is this user's own, and a line of it that is not whole counts as absent: then the
run is read.
"""

import contextlib
import hashlib
import os
import stat
import time
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from jobkit.files import open_regular, write_parts
from jobkit.paths import RunPaths

_SETTLED_S = 2.0  # two writes within the resolution of a clock could leave the same times
_TAIL = 512  # bytes of a file's end that the checksum covers
_MOST_BYTES = 1 << 30
_HEAD = b"jobkit collected 1 "
# Folders and files whose code decides what is read.
_READERS = ("analysis/collect", "analysis/tables", "metric", "outcome", "spec", "program", "*.py")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Mark = tuple[tuple[Any, ...], ...]


class Kept:
    """The results of runs by what they were made of; `save` writes those that were asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = dict(_read(path))
        self._next: dict[bytes, bytes] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether there is a result with this key."""
        return key in self._lines

    def take(self, key: bytes) -> bytes:
        """The result with this key, as encoded() gave it, to be kept."""
        return self._next.setdefault(key, self._lines[key])

    def keep(self, key: bytes, line: bytes) -> None:
        """Keep a result, as encoded() gives it."""
        self._next[key] = line

    def save(self) -> None:
        """Write what was found or kept, if it is not what the file has; not where that fails."""
        if self._next.keys() == self._lines.keys():
            return
        parts = [_HEAD, _source(), b"\n"]
        for key, line in self._next.items():
            parts += [key, b" %08x " % zlib.crc32(line, zlib.crc32(key)), line, b"\n"]
        with contextlib.suppress(OSError):
            write_parts(self._path, parts)


def encoded(result: dict[str, Any]) -> bytes | None:
    """A result as JSON, which has None for NaN; None where JSON cannot take it."""
    try:
        return orjson.dumps(result)
    except TypeError:  # a text that is no UTF-8, a number of more than 64 bits
        return None


def decoded(line: bytes) -> dict[str, Any]:
    """The result that encoded() wrote. Raises ValueError."""
    found: dict[str, Any] = orjson.loads(line)
    return found


def key_of(*inputs: object) -> bytes:
    """A key for what a result was made of, by its representation as text."""
    text = repr(inputs).encode("utf-8", "backslashreplace")
    return hashlib.sha256(text).hexdigest()[:32].encode()


def mark_of(paths: RunPaths) -> Mark | None:
    """What changes with the files that collecting reads; None where that is not safe to tell."""
    newest = time.time() - _SETTLED_S
    try:
        with _folder(paths.folder) as folder:
            files = [(folder, name) for name in ("job.json", "train.log", "train.log.gz")]
            if "metrics" not in paths.names:
                return _marks(files, newest)
            with _folder("metrics", folder) as metrics:
                own = [(metrics, name) for name in _names(metrics)]
                return _marks([*files, *own], newest)
    except OSError:
        return None


@contextlib.contextmanager
def _folder(path: str | Path, within: int | None = None) -> Iterator[int]:
    handle = os.open(path, _FLAGS | os.O_DIRECTORY, dir_fd=within)
    try:
        yield handle
    finally:
        os.close(handle)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


def _marks(files: list[tuple[int, str]], newest: float) -> Mark | None:
    """The mark of each file that is there; None where one is no regular file or is too new."""
    found: list[tuple[Any, ...]] = []
    for folder, name in files:
        try:
            handle = os.open(name, _FLAGS, dir_fd=folder)
        except FileNotFoundError:
            continue
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_mtime > newest:
                return None
            size, times = status.st_size, (status.st_mtime_ns, status.st_ctime_ns)
            tail = os.pread(handle, _TAIL, max(0, size - _TAIL))
            found.append((name, size, *times, status.st_ino, zlib.crc32(tail)))
        finally:
            os.close(handle)
    return tuple(found)


def _read(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """The whole lines of the file by their keys; none where it is not ours or of other code."""
    try:
        with open_regular(path, _MOST_BYTES) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return
            if file.readline(100) != _HEAD + _source() + b"\n":
                return
            for line in file:
                key, _, rest = line.partition(b" ")
                crc, _, text = rest[:-1].partition(b" ")
                if crc == b"%08x" % zlib.crc32(text, zlib.crc32(key)):
                    yield key, text
    except OSError:
        return


@cache
def _source() -> bytes:
    """A checksum of the code that reads, so that another version takes nothing from this one."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for name in _READERS:
        for path in sorted(root.glob(name if name == "*.py" else f"{name}/**/*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32].encode()
