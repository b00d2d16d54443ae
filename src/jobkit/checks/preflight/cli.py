"""Is this allocation sound? Started on every rank, before a training or instead of one.

    bash run.sh --preflight --dry-run          in an allocation: check it on every rank
    python -m jobkit preflight                 elsewhere: check this machine, as one rank
    srun python -m jobkit.checks.preflight.cli    by hand: once for each rank

One line a check says what was measured; each fault has a line with its fix, and the exit code is 5.
One process, at the desk, speaks for all. Nothing waits without an end, and ranks that do not come
are named.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.checks.preflight.request import Wish
from jobkit.errors import Exit, Parser, UsageError
from jobkit.paths import logs_root
from jobkit.payload import main as payload

EPILOG = """examples:
  bash run.sh --preflight --dry-run            in an allocation (salloc, or a batch script)
  python -m jobkit preflight --json            this machine, for a program
  srun python -m jobkit.checks.preflight.cli -- --dataset folder:/data/images

After -- stand the options of the training: its --dataset, --data-dir and --device count here too.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="python -m jobkit preflight",
        description="Check an allocation on every rank: places, GPUs, cores, network, data, logs.",
        epilog=EPILOG,
    )
    made.add_argument("--run-dir", type=Path, help="the run's folder (default: that of all logs)")
    made.add_argument("--dataset", help="the data that must be readable (default: cifar10)")
    made.add_argument("--data-dir", help="where they lie (default: as for a run)")
    made.add_argument("--device", help="auto, cpu or cuda (default: auto)")
    made.add_argument(
        "--timeout", type=float, default=30, metavar="SECONDS", help="how long to wait for ranks"
    )
    made.add_argument("--json", action="store_true", help="print one object, for a program")
    return made


def read_wish(argv: Sequence[str]) -> Wish:
    """What the command line asks for; raises UsageError for what cannot be used."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:at])
    training = payload.parser().parse_args(words[at + 1 :])
    for name in ("dataset", "data_dir", "device"):
        if (value := getattr(args, name)) is not None:
            setattr(training, name, value)
    if not 1 <= args.timeout <= 3600:
        raise UsageError(f"--timeout {args.timeout:g}: between 1 and 3600 seconds")
    spec, _ = payload.read_settings(training)
    folder = args.run_dir or training.run_dir or logs_root()
    return Wish(folder.absolute(), spec, args.timeout, args.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Check as one rank; return the exit code. Only the process at the desk has 5 for the others.

    With one code that is not 0, and that one last, srun ends with it, and not with the code of a
    rank that it has killed.
    """
    try:
        wish = read_wish(sys.argv[1:] if argv is None else argv)
        if "SLURM_JOB_ID" in os.environ and not {"SLURM_STEP_ID", "RANK"} & set(os.environ):
            raise UsageError(
                "this is an allocation, and not a step of it: check it on every rank with "
                "`bash run.sh --preflight --dry-run`"
            )
    except UsageError as error:
        print(f"jobkit: error: {error}", file=sys.stderr)
        return Exit.USAGE
    try:
        from jobkit.checks.preflight.rank import Rank
    except (ImportError, OSError) as error:  # OSError: a library that torch needs
        where = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        print(
            f"[preflight] FAULT versions: rank {rank} on {where}: {error} ({sys.executable}); fix: "
            "use the same environment or container on all nodes, with torch and torchvision",
            flush=True,
        )
        return Exit.PREFLIGHT
    # Should all else hang, in a driver or a file system, the kernel ends the process.
    signal.alarm(int(wish.timeout_s + wish.together_s + 3))
    try:
        return Rank(wish).check()
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    payload.leave(main())
