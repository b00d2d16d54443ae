"""Check an allocation on every rank, before a training or instead of one.

    bash run.sh --preflight --dry-run          in an allocation: check it on every rank
    python -m jobkit preflight                 elsewhere: check this machine, as one rank
    srun python -m jobkit.checks.preflight.cli    by hand: once for each rank

One line per check says what was measured; each fault has a line with its fix, and the exit code is
5. One process, the coordinator, reports for all. Every wait is bounded, and ranks that do not
connect are named.
"""

import os
import sys
from collections.abc import Sequence

from jobkit.errors import Exit, Parser, UsageError, at_least, command
from jobkit.gpus import hide_gpus
from jobkit.paths import RunPaths, logs_root
from jobkit.payload import main as payload
from jobkit.payload.report import write_spec

EPILOG = """examples:
  bash run.sh --preflight --dry-run            in an allocation (salloc, or a batch script)
  python -m jobkit preflight                   this machine
  srun python -m jobkit.checks.preflight.cli --dataset folder:/data/images

Options of a training are taken too: its --run-dir, --dataset, --data-dir and --device are checked.
"""


def parser() -> Parser:
    options = Parser(
        prog="jobkit preflight",
        description="Check an allocation on every rank: ranks, GPUs, cores, network, data, logs.",
        epilog=EPILOG,
    )
    waits, limit = "how long to wait for ranks to connect (default: 30)", at_least(float, 1, 3600)
    options.add_argument("--timeout", type=limit, default=30, metavar="SECONDS", help=waits)
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check as one rank; return the exit code. Only the coordinator returns 5 for other ranks.

    With one code that is not 0, and that one last, srun ends with it, and not with the code of a
    rank that it has killed.
    """
    args, words = parser().parse_known_args(argv)
    training_parser = payload.parser()
    training_parser.prog = "jobkit preflight"
    training = training_parser.parse_args(words)
    spec = payload.read_settings(training)
    run_dir = (training.run_dir or logs_root()).absolute()
    if "SLURM_JOB_ID" in os.environ and not {"SLURM_STEP_ID", "RANK"} & set(os.environ):
        raise UsageError(
            "this is an allocation, and not a step of it: check it on every rank with "
            "`bash run.sh --preflight --dry-run`"
        )
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    me = f"rank {rank} on {os.environ.get('SLURMD_NODENAME') or os.uname().nodename}"
    if spec.device == "cpu":
        hide_gpus()
    try:
        from jobkit.checks.preflight.rank import PreflightRank

        made = PreflightRank(run_dir, spec, args.timeout)
    except (ImportError, OSError) as error:  # OSError: a library that torch needs
        fault = f"versions: {me}: {error} ({sys.executable}); fix: use the same environment or "
        fault += "container on all nodes, with torch and torchvision"
    except UsageError as error:  # of the launcher's variables, with the fix
        fault = f"ranks: {me}: {error}; fix: start ranks with srun as run.sh does"
    else:
        code = made.check()
        if code and rank == "0" and training.run_dir:  # the list of runs has this one too
            names = ("strategy", "model", "dataset")
            tasks, nodes = (int(os.environ.get(f"SLURM_{n}", 1)) for n in ("NTASKS", "NNODES"))
            size = {"nodes": nodes, "ranks_per_node": tasks // nodes}
            write_spec(RunPaths(run_dir), {n: getattr(spec, n) for n in names} | size, 0)
        return code
    print("[preflight] FAULT", fault, flush=True)
    return Exit.PREFLIGHT


if __name__ == "__main__":
    payload.leave(main(None))
