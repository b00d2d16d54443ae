"""The logs of a run: their last lines, and bounds on what is read of them.

Only the tail is kept (TAIL_BYTES), so that a log of any length costs little memory.
"""

import contextlib
import os
from pathlib import Path

from jobkit.files import is_regular, open_regular

TAIL_BYTES = 8 << 20
MOST_READ = 4 << 30  # bytes of a log
_MAX_LINES = 100_000  # of a tail: each takes memory of its own, also an empty one
_MAX_LINE = 4096  # bytes of a line that are looked at


def read_tail(log: Path, size: int = TAIL_BYTES, within: Path | None = None) -> list[str]:
    """Read the last lines of a log, at most size bytes of them; empty without a log.

    within: the folder out of which no link may lead, as it could to any file of this user's; None:
    the one above the log's.
    """
    content, begin = b"", 0
    with contextlib.suppress(OSError):
        if is_regular(log):
            with open_regular(log, within=within or log.parent.parent) as stream:
                begin = stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
                content = stream.read(size)
    parts = content.rsplit(b"\n", _MAX_LINES) if content else []
    if begin or len(parts) > _MAX_LINES:  # the first is what is left, or may be half
        del parts[:1]
    return [part[-_MAX_LINE:].decode("utf-8", "replace") for part in parts]
