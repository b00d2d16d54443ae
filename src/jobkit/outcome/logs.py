"""The logs of a run: plain or packed, their last lines, and bounds on what is read of them.

Only the tail is kept (TAIL_BYTES), so that a log of any length costs little memory.
"""

import gzip
import io
import os
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.files import is_regular, open_regular

TAIL_BYTES = 8 << 20
_MOST_LINES = 100_000  # of a tail: each takes memory of its own, also an empty one
_MOST_NUMBERED = 1 << 30  # bytes of a log whose lines are counted; of a longer one the tail is read
MOST_READ = 4 << 30  # bytes of a log, and a quarter of that where they are packed
_BLOCK = 1 << 20
_LONGEST = 4096  # bytes of a line that are looked at


@dataclass(frozen=True)
class Tail:
    """The last lines of a log: (number from 1, or 0 where not known; text), and the log's name."""

    name: str
    lines: list[tuple[int, str]]

    @property
    def raw(self) -> bytes:
        """The lines again, as bytes, for the reader of records."""
        return "\n".join(text for _, text in self.lines).encode()


def find_log(log: Path) -> Path | None:
    """The log in a run's folder, or its compressed form; None where there is neither."""
    for path in (log, log.with_name(log.name + ".gz")):
        if is_regular(path):
            return path
    return None


def read_tail(log: Path, size: int = TAIL_BYTES, within: Path | None = None) -> Tail:
    """Read the last lines of a log (a .gz too), at most size bytes of them; empty without a log.

    within: the folder out of which no link may lead; None: the one above the log's.
    """
    path = find_log(log)
    if path is None:
        return Tail(log.name, [])
    blocks, kept, newlines, whole, numbered = deque[bytes](), 0, 0, True, True
    for block in _blocks(path, size, within or path.parent.parent):
        numbered = numbered and bool(block)
        blocks.append(block)
        kept += len(block)
        while kept - len(blocks[0]) > size:
            kept, whole = kept - len(blocks[0]), False
            newlines += blocks.popleft().count(b"\n")
    content = b"".join(blocks)
    cut = max(0, len(content) - size)
    newlines += content.count(b"\n", 0, cut)
    parts = content[cut:].rsplit(b"\n", _MOST_LINES)
    if cut or not whole or not numbered or len(parts) > _MOST_LINES:
        newlines += parts[0].count(b"\n") + 1  # the first line's beginning is not here
        parts = parts[1:]
    texts = (part[-_LONGEST:].decode("utf-8", "replace") for part in parts)
    return Tail(path.name, [(newlines + i if numbered else 0, t) for i, t in enumerate(texts, 1)])


def _blocks(path: Path, tail: int, within: Path) -> Iterator[bytes]:
    """The bytes of a log, unpacked; they end where they cannot be read.

    Of a very long one an empty block, and then the tail alone.
    """
    try:
        with open_log(path, within, None) as stream:
            if path.suffix != ".gz" and os.fstat(stream.fileno()).st_size > _MOST_NUMBERED:
                stream.seek(-tail, os.SEEK_END)
                yield b""
            while block := stream.read(_BLOCK):
                yield block
    except OSError:
        return


class _Unpacked(io.RawIOBase):
    """A .gz as plain bytes that end where the archive is truncated; fault then says why."""

    def __init__(self, packed: io.BufferedReader) -> None:
        self._packed, self._left = packed, MOST_READ // 4
        self._stream = gzip.GzipFile(fileobj=packed)
        self.fault = ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            # read1 gives what one read unpacks: nothing of it is lost where the next read fails.
            data = self._stream.read1(len(buffer))
            self._left -= len(data)
            if self._left < 0:
                raise OSError(f"it holds more than {MOST_READ // 4:,} bytes")
        except (EOFError, zlib.error, OSError) as error:
            self.fault = str(error)
            return 0
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        self._packed.close()
        super().close()


def open_log(path: Path, study: Path, most: int | None = MOST_READ) -> io.BufferedReader:
    """Open a log, packed (.gz) or not, as plain bytes; torn_archive tells how a .gz ended.

    most: bytes of the file. Raises OSError where it has more, and where it is a link out of the
    study's folder: in one that somebody else made, that could be any file of this user's.
    """
    opened = open_regular(path, most, within=study)
    return io.BufferedReader(_Unpacked(opened)) if path.suffix == ".gz" else opened


def torn_archive(stream: io.BufferedReader) -> str:
    """Why a stream of open_log ended before its archive did; empty where it did not."""
    return stream.raw.fault if isinstance(stream.raw, _Unpacked) else ""
