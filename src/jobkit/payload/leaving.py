"""How the process of a rank ends: at once, with its output flushed."""

import contextlib
import os
import sys
import traceback
from typing import NoReturn

from jobkit.errors import Exit


def leave_after(error: BaseException, rank: int) -> NoReturn:
    """End the process after an error, printed with the rank on each line (not for INT)."""
    if isinstance(error, KeyboardInterrupt):
        leave(Exit.INTERRUPTED)
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    print("\n".join(f"[rank{rank}] {line}" for line in lines), file=sys.stderr, flush=True)
    leave(Exit.FAILED)


def leave(code: int) -> NoReturn:
    """End the process at once, all output flushed, without the interpreter's finalisation.

    After a failure, destructors of a process group may wait for ranks that will not answer. After
    success, a sharded model still keeps the threads of Gloo and autograd alive (DDP's are gone by
    then): one that asks for the GIL while the interpreter is taken down is ended by force, which
    aborts the process, and a run that has recorded its success looks failed. Files are closed and
    the group is destroyed by now, so nothing is lost.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(code)
