"""The logs of a run: their last lines, and bounds on what is read of them.

Only the tail is kept (TAIL_BYTES), so that a log of any length costs little memory.
"""

import io
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobkit.files import is_regular, open_regular

TAIL_BYTES = 8 << 20
_MOST_LINES = 100_000  # of a tail: each takes memory of its own, also an empty one
_MOST_NUMBERED = 1 << 30  # bytes of a log whose lines are counted; of a longer one the tail is read
MOST_READ = 4 << 30  # bytes of a log
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


def read_tail(log: Path, size: int = TAIL_BYTES, within: Path | None = None) -> Tail:
    """Read the last lines of a log, at most size bytes of them; empty without a log.

    within: the folder out of which no link may lead; None: the one above the log's.
    """
    if not is_regular(log):
        return Tail(log.name, [])
    blocks, kept, newlines, whole, numbered = deque[bytes](), 0, 0, True, True
    for block in _blocks(log, size, within or log.parent.parent):
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
    return Tail(log.name, [(newlines + i if numbered else 0, t) for i, t in enumerate(texts, 1)])


def _blocks(path: Path, tail: int, within: Path) -> Iterator[bytes]:
    """The bytes of a log; they end where they cannot be read.

    Of a very long one an empty block, and then the tail alone.
    """
    try:
        with open_log(path, within, None) as stream:
            if os.fstat(stream.fileno()).st_size > _MOST_NUMBERED:
                stream.seek(-tail, os.SEEK_END)
                yield b""
            while block := stream.read(_BLOCK):
                yield block
    except OSError:
        return


def open_log(path: Path, study: Path, most: int | None = MOST_READ) -> io.BufferedReader:
    """Open a log.

    most: bytes of the file. Raises OSError where it has more, and where it is a link out of the
    study's folder: in one that somebody else made, that could be any file of this user's.
    """
    return open_regular(path, most, within=study)
