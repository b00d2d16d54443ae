"""How the process of a rank ends: at once, with its output flushed, unless it is profiled."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

from jobkit.errors import Exit, RanksDiffer, UsageError

T = TypeVar("T")
# Set in the processes that a vendor's profiler traces: by nsys and ncu (CUDA's injection), by
# rocprof and rocprofv3 (libraries of HSA and of rocprofiler-sdk).
_PROFILED = (
    "NSYS_PROFILING_SESSION_ID",
    "CUDA_INJECTION64_PATH",
    "HSA_TOOLS_LIB",
    "ROCP_TOOL_LIB",
    "ROCP_TOOL_LIBRARIES",
)


def as_rank(rank: int, act: Callable[[], T]) -> T:
    """What a rank's work returns. Any error but a UsageError ends the process, after its report."""
    try:
        return act()
    except UsageError:
        raise
    except BaseException as error:
        leave_after(error, rank)


def refused(error: UsageError) -> int:
    """The exit code of a rank for bad input, which rank 0 prints in one line."""
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0:
        print(f"jobkit: error: {error}", file=sys.stderr, flush=True)
    # 0 under the torchrun of run.sh, which reads the outcome: so it prints no traceback.
    return Exit.OK if os.environ.get("JOBKIT_READS_OUTCOME") else Exit.USAGE


def leave_after(error: BaseException, rank: int) -> NoReturn:
    """End the process after an error, printed with the rank on each line (not for INT)."""
    if isinstance(error, KeyboardInterrupt):
        leave(Exit.INTERRUPTED)
    if isinstance(error, RanksDiffer):
        print(f"[rank{rank}] {error}", file=sys.stderr, flush=True)
        leave(Exit.THRESHOLD)
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    print("\n".join(f"[rank{rank}] {line}" for line in lines), file=sys.stderr, flush=True)
    leave(Exit.FAILED)


def leave(code: int) -> NoReturn:
    """End the process at once, all output flushed, without the interpreter's finalisation.

    After a failure, destructors of a process group may wait for ranks that will not answer. After
    success, a sharded model still keeps the threads of Gloo and autograd alive (DDP's are gone by
    then): one that asks for the GIL while the interpreter is taken down is ended by force, which
    aborts the process, and a run that has recorded its success looks failed. Files are closed and
    the group is destroyed by now, so nothing is lost. Under a vendor's profiler the process ends
    as any other does, unless it failed: what the profiler has not written yet it writes then.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            stream.flush()
    if code in (Exit.OK, Exit.AGAIN) and any(os.environ.get(name) for name in _PROFILED):
        sys.exit(code)
    os._exit(code)
