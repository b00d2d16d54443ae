"""The entry of a job: `python -m jobkit.payload.main --strategy ddp --epochs 2 ...`

run.sh starts one of these for each rank, by srun or torchrun. Settings are those of RunSpec.
"""

import argparse
import contextlib
import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jobkit.entry import protect_output
from jobkit.errors import Exit, Parser, RanksDiffer, UsageError
from jobkit.gpus import hide_gpus, prepare_rocm
from jobkit.paths import RunPaths
from jobkit.payload.place import read_rank_env, set_threads, share_of_cores
from jobkit.payload.report import check_folder, write_outcome
from jobkit.payload.signals import StopRequest
from jobkit.spec.dataset import check_source
from jobkit.spec.options import (
    add_recipe_argument,
    add_spec_arguments,
    chosen_settings,
    read_spec_file,
)
from jobkit.spec.runspec import RunSpec, overridden

# Set in the processes that a vendor's profiler traces: by nsys and ncu (CUDA's injection), by
# rocprof and rocprofv3 (libraries of HSA and of rocprofiler-sdk).
_PROFILED = (
    "NSYS_PROFILING_SESSION_ID",
    "CUDA_INJECTION64_PATH",
    "HSA_TOOLS_LIB",
    "ROCP_TOOL_LIB",
    "ROCP_TOOL_LIBRARIES",
)
EPILOG = """examples:
  bash run.sh --nproc-per-node 2 --strategy ddp --epochs 2 --dataset synthetic
  sbatch run.sh --strategy fsdp --precision bf16
  bash run.sh --spec logs/strong/RUN_ID/spec.json --epochs 20
"""


def parser() -> argparse.ArgumentParser:
    options = Parser(
        prog="run.sh",
        usage="%(prog)s [options]",
        description="Train a model under one parallel strategy and print [METRIC] lines. "
        "'bash run.sh --help' shows how it is started.",
        epilog=EPILOG,
    )
    add = options.add_argument
    add("--run-dir", type=Path, help="the run's folder (run.sh gives it)")
    add("--attempt", type=int, default=0, help="number of this start of the run")
    spec = (
        "repeat a run from the spec.json that it left, or take settings from a YAML file "
        "(epochs: 3); other options override it, and the number of ranks comes from the launcher"
    )
    add("--spec", type=Path, metavar="FILE", help=spec)
    dry = "set everything up, one forward pass, then stop; nothing is written"
    add("--dry-run", action="store_true", help=dry)
    check = "check the settings for RANKS (default 1) or NODESxRANKS without torch, then stop"
    add("--check", type=size, nargs="?", const=(1, 1), metavar="RANKS", help=check)
    source = (
        "start from a checkpoint of another run, if this one has none: its folder, or one in its "
        "checkpoints/; the strategy and the number of ranks may differ"
    )
    add("--resume-from", type=Path, metavar="DIR", help=source)
    add_recipe_argument(options)
    add_spec_arguments(options)
    return options


def size(text: str) -> tuple[int, int]:
    """The nodes and the ranks of each: of 2x4 or, on one node, of 4."""
    if not (match := re.fullmatch(r"(?:(\d+)x)?(\d+)", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not RANKS or NODESxRANKS, as 8 or 2x4")
    return int(match[1] or 1), int(match[2])


def read_settings(args: argparse.Namespace, nodes: int = 1, ranks_per_node: int = 1) -> RunSpec:
    """The run's settings. Raises UsageError for a file of --spec, or a setting, of no use."""
    changes = {**chosen_settings(args), "nodes": nodes, "ranks_per_node": ranks_per_node}
    if args.spec is None:
        return RunSpec(**changes)
    settings = read_spec_file(args.spec)
    try:
        RunSpec(**settings)
    except UsageError as error:
        raise UsageError(f"--spec {args.spec}: {error}") from None
    return RunSpec(**overridden(settings, changes))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; return its exit code. Rank 0 prints bad input as one line."""
    args = parser().parse_args(argv)
    known = RunPaths(args.run_dir.absolute()) if args.run_dir else None
    paths = None if args.dry_run or args.check else known  # into which is written
    try:
        if args.check is not None:
            spec = read_settings(args, *args.check)
            check_source(spec.dataset)
            if known:
                check_folder(known, spec.to_dict())
            return Exit.OK
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints its own start
        stop = StopRequest()
        stop.listen()  # before torch is imported, which takes seconds
        place = read_rank_env()
        spec = read_settings(args, place.nodes, place.local_world_size)
        check_source(spec.dataset)
        set_threads(spec.threads or share_of_cores(place.local_world_size))
        if spec.device == "cpu":
            hide_gpus()
        prepare_rocm(place.local_rank)
        gc.disable()  # imports make many objects, in which garbage is looked for again and again
        from jobkit.payload.run import RankJob, run_rank

        gc.enable()
        job = RankJob(
            spec=spec,
            place=place,
            paths=paths,
            attempt=args.attempt,
            dry_run=args.dry_run,
            stop=stop,
            resume_from=args.resume_from,
        )
        as_rank(place.rank, lambda: run_rank(job))
        return Exit.OK  # the outcome says 75 of one that was stopped: a code would end other ranks
    except UsageError as error:
        write_outcome(paths, args.attempt, "failed", Exit.USAGE, str(error))
        return refused(error)


def as_rank(rank: int, act: Callable[[], None]) -> None:
    """Do a rank's work. Any error but a UsageError ends the process.

    It is printed with the rank on each line before, unless it is INT.
    """
    try:
        act()
    except UsageError:
        raise
    except KeyboardInterrupt:
        leave(Exit.INTERRUPTED)
    except BaseException as error:
        differ = isinstance(error, RanksDiffer)
        text = str(error) if differ else "".join(traceback.format_exception(error)).rstrip()
        lines = [f"[rank{rank}] {line}" for line in text.splitlines()]
        print("\n".join(lines), file=sys.stderr, flush=True)
        leave(Exit.THRESHOLD if differ else Exit.FAILED)


def refused(error: UsageError) -> int:
    """The exit code of a rank for bad input, which rank 0 prints in one line."""
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0:
        print(f"jobkit: error: {error}", file=sys.stderr, flush=True)
    # 0 under the torchrun of run.sh, which reads the outcome, or a dry run's file: so it prints no
    # traceback.
    file = os.environ.get("JOBKIT_READS_OUTCOME")
    if file not in (None, "1"):
        Path(file).write_text("refused")
    return Exit.OK if file else Exit.USAGE


def leave(code: int) -> NoReturn:
    """End the process at once, all output flushed, without the interpreter's finalisation.

    After a failure, destructors of a process group may wait for ranks that will not answer. After
    success, a sharded model still has threads of Gloo and autograd: one that asks for the GIL while
    the interpreter is taken down aborts the process, and a run that recorded its success looks
    failed. Files are closed and the group is destroyed by now, so nothing is lost. Under a vendor's
    profiler the process ends as any other, unless it failed: the profiler writes its file then.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            stream.flush()
    if code == Exit.OK and any(os.environ.get(name) for name in _PROFILED):
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    # The records are in files: a log that takes no more, or a reader that left, ends no training.
    protect_output()
    leave(main())
