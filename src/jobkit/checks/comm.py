"""Measure collective latency and bandwidth: `python -m jobkit comm`, on every rank of a job.

    python -m jobkit comm --nproc-per-node 2      this machine (the same as bash run.sh --comm)
    sbatch --nodes=2 hpc/comm.sh                  a cluster

Times all_reduce, all_gather, reduce_scatter, broadcast, all_to_all and sendrecv over a range of
sizes, checks every result, and fits a latency and a bandwidth to each.
"""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.errors import Exit, Parser, UsageError, read_bytes
from jobkit.metric.comm import OPERATIONS
from jobkit.paths import REPOSITORY, RunPaths
from jobkit.payload.main import as_rank, leave, refused, size

EPILOG = """examples:
  python -m jobkit comm --nproc-per-node 2 --max-bytes 64M
  sbatch --nodes=2 --ntasks-per-node=4 hpc/comm.sh
  srun python -m jobkit comm --run-dir logs/comm/mine --ops all_reduce sendrecv

As nccl-tests define it, algbw (algorithm bandwidth) is bytes / time, and busbw (bus bandwidth) is
that times 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, 1 for
broadcast and sendrecv (n ranks). Bytes are those of a rank's buffer; of all_gather those of the
output. sendrecv is between two ranks of a node and, where there are several, of two nodes.

exit codes: 0 measured; 1 failed, or a result was wrong; 2 wrong usage
"""


def parser() -> Parser:
    new = Parser(
        prog="jobkit comm",
        usage="%(prog)s [options]",
        description="Measure collective latency and bandwidth between the ranks.",
        epilog=EPILOG,
    )
    add = new.add_argument
    add("--ops", nargs="+", metavar="NAME", choices=OPERATIONS, default=list(OPERATIONS),
        help=f"operations to measure (default: {' '.join(OPERATIONS)})")  # fmt: skip
    add("--backend", choices=("auto", "gloo", "nccl"), default="auto",
        help="gloo: on the CPU; nccl: on GPUs; auto: nccl where there are GPUs")  # fmt: skip
    add("--min-bytes", type=read_bytes, default=1024, metavar="SIZE",
        help="smallest message (default: 1K); each next one is four times as large")  # fmt: skip
    add("--max-bytes", type=read_bytes, metavar="SIZE",
        help="largest message, as 64M (default: 1G, or what fits in free memory; a job's memory "
        "limit is not read)")  # fmt: skip
    add("--nproc-per-node", metavar="N", help="ranks on this machine, without Slurm")
    add("--run-dir", type=Path, metavar="DIR", help="folder (default: a new one in logs/comm/)")
    add("--attempt", type=int, default=0, metavar="N", help="number of this start (set by run.sh)")
    add("--check", type=size, nargs="?", const=(1, 2), metavar="RANKS", help="check, then exit")
    return new


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as one rank, where a launcher has started it; else have run.sh start the ranks."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    try:
        if args.max_bytes is not None and args.max_bytes < args.min_bytes:
            raise UsageError(
                f"--max-bytes {args.max_bytes} is less than --min-bytes {args.min_bytes}"
            )
        if args.check is not None:
            check_ranks(math.prod(args.check))
            return Exit.OK
        if not {"RANK", "SLURM_STEP_ID"} & set(os.environ):  # run.sh is the one that starts ranks
            sys.stdout.flush()
            os.environ.setdefault("JOBKIT_PYTHON", sys.executable)
            os.execvp("bash", ["bash", str(REPOSITORY / "run.sh"), "--comm", *words])
        if args.run_dir is None:
            raise UsageError("a rank needs --run-dir: start them with bash run.sh --comm")
        from jobkit.checks.collectives import measure
        from jobkit.payload.place import read_rank_env
        from jobkit.payload.report import write_outcome

        place, paths = read_rank_env(), RunPaths(args.run_dir.absolute())
        try:
            check_ranks(place.world_size)
        except UsageError as error:
            write_outcome(paths, args.attempt, "failed", Exit.USAGE, str(error))
            raise
        # A failure is reported with its rank, and ends the process at once.
        as_rank(place.rank, lambda: measure(place, paths, args))
        return Exit.OK
    except UsageError as error:
        return refused(error)


def check_ranks(ranks: int) -> None:
    """Raise UsageError for fewer than two ranks."""
    if ranks < 2:
        raise UsageError(
            "the benchmark needs at least 2 ranks: say --nproc-per-node 2, or in an allocation "
            "take 2 tasks or more (sbatch --ntasks-per-node, or --nodes)"
        )


if __name__ == "__main__":
    leave(main())
