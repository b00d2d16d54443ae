"""The logs of a run: their last lines, and bounds on what is read of them.

Only the tail is kept (TAIL_BYTES), so that a log of any length costs little memory.
"""

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

from jobkit.files import is_regular, open_regular

TAIL_BYTES = 8 << 20
MOST_READ = 4 << 30  # bytes of a log
_MAX_LINES = 100_000  # of a tail: each takes memory of its own, also an empty one
_MAX_NUMBERED = 1 << 30  # bytes of a log whose lines are counted; of a longer one the tail is read
_MAX_LINE = 4096  # bytes of a line that are looked at
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Tail:
    """The last lines of a log: (number from 1, or 0 where not known; text), and the log's name."""

    name: str
    lines: list[tuple[int, str]]

    @property
    def raw(self) -> bytes:
        """The lines again, as bytes, for the reader of records."""
        return "\n".join(text for _, text in self.lines).encode()


def read_tail(log: Path, size: int = TAIL_BYTES, within: Path | None = None) -> Tail:
    """Read the last lines of a log, at most size bytes of them; empty without a log.

    within: the folder out of which no link may lead; None: the one above the log's.
    """
    content, begin, newlines, numbered = b"", 0, 0, True
    with contextlib.suppress(OSError):
        if is_regular(log):
            with open_log(log, within or log.parent.parent, None) as stream:
                begin = max(0, os.fstat(stream.fileno()).st_size - size)
                numbered = begin <= _MAX_NUMBERED
                for at in range(0, begin if numbered else 0, _BLOCK):
                    newlines += stream.read(min(_BLOCK, begin - at)).count(b"\n")
                stream.seek(begin)
                content = stream.read(size)
    parts = content.rsplit(b"\n", _MAX_LINES) if content else []
    if parts and (begin or len(parts) > _MAX_LINES):
        newlines += parts[0].count(b"\n") + 1  # the first line's beginning is not here
        parts = parts[1:]
    texts = (part[-_MAX_LINE:].decode("utf-8", "replace") for part in parts)
    return Tail(log.name, [(newlines + i if numbered else 0, t) for i, t in enumerate(texts, 1)])


def open_log(path: Path, study: Path, most: int | None = MOST_READ) -> io.BufferedReader:
    """Open a log.

    most: bytes of the file. Raises OSError where it has more, and where it is a link out of the
    study's folder: in one that somebody else made, that could be any file of this user's.
    """
    return open_regular(path, most, within=study)
