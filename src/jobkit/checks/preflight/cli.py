"""Check an allocation on every rank, before a training or instead of one.

    bash run.sh --preflight --dry-run          in an allocation: check it on every rank
    python -m jobkit preflight                 elsewhere: check this machine, as one rank
    srun python -m jobkit.checks.preflight.cli    by hand: once for each rank

One line per check says what was measured; each fault has a line with its fix, and the exit code is
5. One process, the coordinator, reports for all. Every wait is bounded, and ranks that do not
connect are named.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.checks.requests import PreflightRequest
from jobkit.errors import Exit, Parser, UsageError, at_least, command
from jobkit.gpus import hide_gpus
from jobkit.paths import logs_root
from jobkit.payload import main as payload

EPILOG = """examples:
  bash run.sh --preflight --dry-run            in an allocation (salloc, or a batch script)
  python -m jobkit preflight --json            this machine, as one JSON object
  srun python -m jobkit.checks.preflight.cli -- --dataset folder:/data/images

Options of the training follow --: its --dataset, --data-dir and --device are checked too.
"""


def parser() -> Parser:
    """Return the parser of the command line."""
    options = Parser(
        prog="jobkit preflight",
        description="Check an allocation on every rank: ranks, GPUs, cores, network, data, logs.",
        epilog=EPILOG,
    )
    options.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder of the run (default: logs/)"
    )
    options.add_argument(
        "--dataset", metavar="NAME", help="dataset that must be readable (default: cifar10)"
    )
    options.add_argument(
        "--data-dir", metavar="DIR", help="folder of the data (default: as for a run)"
    )
    options.add_argument("--device", metavar="TYPE", help="auto, cpu or cuda (default: auto)")
    options.add_argument(
        "--timeout",
        type=at_least(float, 1),
        default=30,
        metavar="SECONDS",
        help="how long to wait for ranks to connect (default: 30)",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return options


def read_request(argv: Sequence[str]) -> PreflightRequest:
    """Return what the command line asks for; raises UsageError for what cannot be used."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:at])
    training = payload.parser().parse_args(words[at + 1 :])
    for name in ("dataset", "data_dir", "device"):
        if (value := getattr(args, name)) is not None:
            setattr(training, name, value)
    if args.timeout > 3600:
        raise UsageError(f"--timeout {args.timeout:g}: must be 3600 seconds or less")
    spec, _ = payload.read_settings(training)
    folder = args.run_dir or training.run_dir or logs_root()
    return PreflightRequest(folder.absolute(), spec, args.timeout, args.json)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check as one rank; return the exit code. Only the coordinator returns 5 for other ranks.

    With one code that is not 0, and that one last, srun ends with it, and not with the code of a
    rank that it has killed.
    """
    request = read_request(sys.argv[1:] if argv is None else argv)
    if "SLURM_JOB_ID" in os.environ and not {"SLURM_STEP_ID", "RANK"} & set(os.environ):
        raise UsageError(
            "this is an allocation, and not a step of it: check it on every rank with "
            "`bash run.sh --preflight --dry-run`"
        )
    if request.spec.device == "cpu":
        hide_gpus()
    try:
        from jobkit.checks.preflight.rank import PreflightRank
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
    signal.alarm(int(request.timeout_s + request.together_s + 3))
    try:
        return PreflightRank(request).check()
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    payload.leave(main(None))
