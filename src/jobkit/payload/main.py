"""The entry of a job: `python -m jobkit.payload.main --strategy ddp --epochs 2 ...`

run.sh starts one of these for each rank, by srun or torchrun. Settings are those of RunSpec.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jobkit.dataset import check_source
from jobkit.errors import Exit, UsageError
from jobkit.paths import RunPaths
from jobkit.spec import RunSpec, add_spec_arguments, given_settings

EPILOG = """examples:
  bash run.sh --nproc-per-node 2 --strategy ddp --epochs 2 --dataset synthetic
  sbatch run.sh --strategy fsdp --precision bf16
  python -m jobkit.payload.main --strategy single --dataset folder:images.tar
"""


def parser() -> argparse.ArgumentParser:
    """The payload's command line."""
    made = argparse.ArgumentParser(
        prog="run.sh",
        description="Train a model under one parallel strategy and print [METRIC] lines.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--run-dir", type=Path, help="the run's folder (run.sh gives it)")
    made.add_argument("--attempt", type=int, default=0, help="which start of the run this is")
    made.add_argument(
        "--dry-run",
        action="store_true",
        help="set everything up, one forward pass, then stop; nothing is recorded",
    )
    made.add_argument(
        "--check", action="store_true", help="check the settings without torch, then stop"
    )
    add_spec_arguments(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; return its exit code. Tells of bad input in one line, on rank 0."""
    chief = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0
    args = parser().parse_args(argv)
    paths = RunPaths(args.run_dir.absolute()) if args.run_dir and not args.dry_run else None
    try:
        spec = RunSpec(**given_settings(args))
        check_source(spec.dataset)
        if args.check:
            return Exit.OK
        return _run_rank(spec, paths, args.attempt, args.dry_run)
    except UsageError as error:
        from jobkit.payload.report import write_outcome

        write_outcome(paths, args.attempt, "failed", Exit.USAGE, str(error))
        if chief:
            print(f"jobkit: error: {error}", file=sys.stderr, flush=True)
        return _usage_code()


def _usage_code() -> int:
    """2; but 0 under the torchrun of run.sh, which reads the outcome: it prints no traceback."""
    return Exit.OK if os.environ.get("JOBKIT_READS_OUTCOME") else Exit.USAGE


def _run_rank(spec: RunSpec, paths: RunPaths | None, attempt: int, dry_run: bool) -> int:
    """Train as one rank of the job. A failure is told with its rank, in the log and the outcome."""
    from jobkit.payload.distributed import find_place
    from jobkit.payload.report import write_outcome
    from jobkit.payload.run import run_rank

    place = find_place()
    spec = replace(spec, nodes=place.nodes, ranks_per_node=place.local_world_size)
    try:
        run_rank(spec, place, paths, attempt, dry_run)
    except UsageError:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        cause = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
        write_outcome(paths, attempt, "failed", Exit.FAILED, f"rank {place.rank}: {cause}")
        lines = traceback.format_exc().rstrip().splitlines()
        print(
            "\n".join(f"[rank{place.rank}] {line}" for line in lines), file=sys.stderr, flush=True
        )
        # No tidy end: destructors of a process group may wait for ranks that will not answer.
        sys.stdout.flush()
        os._exit(Exit.FAILED)
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
