"""Options of run_benchmarks.py for the place of the runs: this machine, or Slurm."""

import argparse

from jobkit.errors import at_least
from jobkit.launch.site import GPU_REQUESTS
from jobkit.launch.slurm.options import OVERRIDES


def add_local_arguments(made: argparse.ArgumentParser) -> None:
    """Add the options of torchrun, for runs on this machine."""
    group = made.add_argument_group("this machine", "Only for runs without Slurm.")
    group.add_argument(
        "--monitor-interval",
        type=at_least(float, 0.001),
        metavar="S",
        help="seconds between two checks of a run's ranks (default 0.1)",
    )
    group.add_argument(
        "--start-timeout",
        type=at_least(float, 0.001),
        metavar="S",
        help="seconds until all ranks of a run must have started (default 60)",
    )


def add_slurm_arguments(made: argparse.ArgumentParser) -> None:
    """Add the options that apply on Slurm only."""
    group = made.add_argument_group("Slurm", "They override those of the site.")
    group.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="pass an option through to sbatch, as --sbatch --nice=100; repeatable",
    )
    for name, (short, text) in OVERRIDES.items():
        flags = [f"--{name}"] + ([short] if short else [])
        group.add_argument(*flags, help=text, metavar="X", dest=f"sbatch_{name}")
    group.add_argument(
        "--gpu-request",
        choices=GPU_REQUESTS,
        help="how GPUs are asked for, one per rank; none: whole nodes are allocated "
        "(default: the site's way, else gpus-per-node)",
    )
    group.add_argument(
        "--exclusive", action="store_true", dest="sbatch_exclusive", help="allocate whole nodes"
    )
    group.add_argument(
        "--within-allocation",
        action="store_true",
        help="run all in one allocation of the largest size, one after the other",
    )
    group.add_argument(
        "--max-node-hours",
        type=float,
        metavar="X",
        help="refuse a plan that may need more node-hours",
    )
    group.add_argument(
        "--no-collect",
        action="store_true",
        help="submit no job that collects and plots after all others",
    )
