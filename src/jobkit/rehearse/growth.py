"""What grows with the size of a job, and whether it grows faster than the job does."""

import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import NotStarted, one_line
from jobkit.rehearse.standin import calls

FASTER = 1.2  # exponents above it are named; seconds on a busy machine scatter
_LEAST_S = 1.0  # seconds whose growth can be told


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one command took, with the processes that it waited for."""

    wall_s: float
    cpu_s: float
    calls: int  # read and write calls; 0 where the system does not count them


def timed(words: Sequence[str], log: Path, allowed: Sequence[int] = (0,)) -> Cost:
    """Run a command, its output appended to a log. Raises NotStarted for another exit code."""
    begin, at = time.monotonic(), log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except BaseException:  # stopped: what it started must not go on alone
        process.terminate()
        process.wait()
        raise
    try:  # of a process that has ended and is not yet forgotten, with its children's
        counted = calls(Path(f"/proc/{process.pid}/io").read_text())
    except OSError:
        counted = 0
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in allowed:
        said = log.read_bytes()[at:].decode("utf-8", "replace").strip().splitlines()
        what = one_line(said[-1]) if said else f"exit code {process.returncode}"
        what = what.removeprefix("jobkit: error: ")
        raise NotStarted(f"{words[2]} {words[3]} failed: {what}; see {log}")
    cpu_s = used.ru_utime + used.ru_stime
    return Cost(wall_s=time.monotonic() - begin, cpu_s=cpu_s, calls=counted)


def files_of(folder: Path) -> tuple[int, float]:
    """The files of a study, and their MiB."""
    sizes = [path.lstat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes) / 2**20


def exponent(ranks: Sequence[int], values: Sequence[float]) -> float | None:
    """How a quantity grows from the first size to the last: as ranks to the power of this.

    0: not at all; 1: as the job. None where there is one size only, or nothing was counted.
    """
    if len(values) < 2 or min(values) <= 0:
        return None
    return math.log(values[-1] / values[0]) / math.log(ranks[-1] / ranks[0])


def faster(
    ranks: Sequence[int], rows: Mapping[str, Sequence[float]], limit: float = FASTER
) -> list[str]:
    """The quantities that grow faster than the job; seconds only where there are enough."""
    found = []
    for name, values in rows.items():
        power = exponent(ranks, values)
        enough = not name.endswith(" s") or min(values) >= _LEAST_S
        if power is not None and power > limit and enough:
            found.append(name)
    return found


def table(sizes: Sequence[str], ranks: Sequence[int], rows: Mapping[str, Sequence[float]]) -> str:
    """A Markdown table: a row for each quantity, a column for each size, and the exponent."""
    head = ["", *(f"{r:,} ({size})" for r, size in zip(ranks, sizes, strict=True)), "exponent"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, values in rows.items():
        power = exponent(ranks, values)
        shown = [f"{v:,.2f}" if isinstance(v, float) else f"{v:,}" for v in values]
        lines.append([name, *shown, "" if power is None else f"{power:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
