"""A simulated rank: python -m jobkit.rehearse.standin. A small process that trains nothing.

It writes the records that a rank of any program with the meter writes, takes the stop signal as a
program that saves its state does (exit code 75), and needs neither torch nor another package.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Exit, command, whole
from jobkit.program import meter

STEPS, STEP_S = 20, 0.01
WORK = 1.0  # of one rank in one step, in calls of time.sleep
IO = Path("/proc/self/io")  # Linux: what this process has read and written


def parser() -> argparse.ArgumentParser:
    """The command line of a simulated rank."""
    made = argparse.ArgumentParser(
        prog="jobkit.rehearse.standin", description="A simulated rank, which trains nothing."
    )
    made.add_argument("--steps", type=whole(1), default=STEPS, metavar="N")
    return made


def calls(text: str) -> int:
    """The read and write calls that a /proc/PID/io counts; 0 where it has none."""
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return int(fields.get("syscr", 0)) + int(fields.get("syscw", 0))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Step, record, and end; return 75 where the stop signal came."""
    args = parser().parse_args(argv)
    meter.start(unit="simulated steps")
    for _ in range(args.steps):
        time.sleep(STEP_S)
        meter.step(work=WORK)
        if meter.stop_requested():
            meter.end("preempted", "stop signal")
            return Exit.AGAIN
    meter.epoch(0)
    meter.end()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank == ranks - 1 and IO.exists():
        print(f"[simulated] rank {rank}: {calls(IO.read_text())} read and write calls", flush=True)
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
