"""The encoder and the writer of [METRIC] lines; jobkit.metric.kinds has the kinds and fields."""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import time
import zlib
from pathlib import Path
from typing import Any, BinaryIO, TextIO

SCHEMA_VERSION = 1
TAG = "[METRIC]"
MAX_LINE_BYTES = 1000  # of a line in the log beside the file: srun tears longer ones
OF_SAMPLES = {"samples", "images", "sequences", "examples"}  # what a batch's first size is
Record = dict[str, Any]
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def finite(value: Any) -> Any:
    """The value with every NaN and infinity as None, which JSON writes as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def as_number(value: Any) -> Any:
    """The value as a number that JSON has; None if it is none."""
    if isinstance(value, (int, float)):
        return value
    with contextlib.suppress(Exception):
        return float(value)
    return None


def same_unit(counted: str | None, of_study: str | None) -> bool:
    """Whether work that a program counts in a unit may be the study's; None: no unit is said."""
    given = {counted, of_study} - {None}
    return len(given) < 2 or given <= OF_SAMPLES


def encode(record: Record) -> str:
    """The record as one JSON object with its checksum; no newline and never the tag inside."""
    try:
        text = _ENCODER.encode(record)
    except (TypeError, ValueError):  # a number that is not finite, or a key that is no text
        text = _ENCODER.encode(finite(record))
    text = text.replace(TAG, "[METRIC\\u005d")
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}'


class Writer:
    """Writes the records of one attempt: to its metrics file, and a copy to the log."""

    def __init__(
        self,
        *,
        study: str,
        run_id: str,
        attempt: int,
        rank: int,
        path: Path | None,
        log: TextIO | None,
    ) -> None:
        self._common = {"study": study, "run_id": run_id, "attempt": attempt, "rank": rank}
        self._log, self._seq = log, 0
        self._file: BinaryIO | None = None
        self._path = path
        self.folder = path.parent.parent if path else None  # of the run; the file is in metrics/
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered and O_APPEND: one write per record, so that a kill cannot tear one.
            flags = os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            flags |= os.O_WRONLY
            self._file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)

    def write(self, kind: str, **fields: Any) -> None:
        """Write one record. The log's copy of a long one is without its longest fields."""
        head = {"v": SCHEMA_VERSION, "kind": kind, **self._common, "seq": self._seq}
        head["t"] = time.time()
        line = encode({**head, **fields})
        self._seq += 1
        if self._file:
            self._append(self._file, line.encode() + b"\n")
            while fields and len(TAG) + 2 + len(line) > MAX_LINE_BYTES:
                del fields[max(fields, key=lambda name: len(encode({name: fields[name]})))]
                line = encode({**head, **fields})
        if self._log:
            self._log.write(f"{TAG} {line}\n")
            self._log.flush()

    def _append(self, file: BinaryIO, line: bytes) -> None:
        """Write a whole line, or none of it. Raises OSError, as where the disk is full."""
        if (written := file.write(line)) != len(line):
            os.ftruncate(file.fileno(), file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def continue_alone(self) -> bool:
        """Continue the numbers of a file; False where another process is writing it.

        A training may start again within an attempt, and may start others that inherit its place.
        """
        if not (self._file and self._path):
            return True
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the file system has no locks
        numbers = re.findall(rb'"seq":(\d+)', self._path.read_bytes()[-(1 << 16) :])
        self._seq = max(map(int, numbers), default=-1) + 1
        return True

    def close(self) -> None:
        if self._file:
            self._file.close()
