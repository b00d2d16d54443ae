"""`python run_benchmarks.py`: expands a study, starts its missing runs, and follows them."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jobkit import __version__
from jobkit.errors import UsageError, at_least, command
from jobkit.gpus import count_gpus
from jobkit.launch.dry_run import dry_run
from jobkit.launch.kubernetes.options import add_kubernetes_arguments, kubernetes_options
from jobkit.launch.place_options import add_local_arguments, add_slurm_arguments
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import known_sites
from jobkit.launch.slurm.cluster import find_site
from jobkit.launch.slurm.options import OVERRIDES, verbatim
from jobkit.launch.slurm.words import SbatchParser
from jobkit.outcome.state import BAD_ENDS
from jobkit.requeue import MAX_RESTARTS
from jobkit.spec.command import LAUNCHERS
from jobkit.spec.options import (
    add_grid_arguments,
    add_recipe_argument,
    add_spec_arguments,
    given_settings,
    with_words,
)
from jobkit.spec.study import STUDIES, Plan, Study

DEFAULT_STUDY = "strong"
_FIT_HERE = (None, "threads")  # studies whose sizes are those of this machine, off Slurm
EPILOG = """examples:
  python run_benchmarks.py --study demo                        a first look, on any machine
  python run_benchmarks.py --study strong --dry-run            print each command, write nothing
  python run_benchmarks.py --strategies ddp fsdp --gpus 1 2 --repeats 3 --epochs 3
  python run_benchmarks.py --study my.toml --name wide --width 4 --precision bf16
  python run_benchmarks.py --gpus 4 8 16 --gpus-per-node 4 -A project --sbatch --nice=100
  python run_benchmarks.py --sweep precision=fp32,bf16 width=1,2 --gpus 1
  python run_benchmarks.py --gpus 1 2 4 8 -- python train.py --batch-size 32
  python run_benchmarks.py --gpus 1 2 4 --unit images --work-per-step 512 -- \\
      python train.py --batch-size '{512 / ranks}'

After -- comes the command of any training program; each rank starts it with torchrun's variables.
{ranks}, {nodes}, {ranks_per_node} and {repeat} in it are replaced, also in whole-number arithmetic;
/ must divide. Write {{ for a brace.

Run the same command again to start only the runs that are missing or failed.
Exit codes: 0 all runs are ok, 1 a run is not, 2 wrong usage, 3 with --no-wait: not all runs were
submitted, 130 and 143 stopped.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of run_benchmarks.py."""
    made = SbatchParser(
        prog="run_benchmarks.py",
        usage="%(prog)s [options] [-- command]",
        description="Run a study: the same training at several sizes, jobkit's own under several "
        "strategies or any other program's.",
        epilog=EPILOG,
    )
    made.add_argument("--version", action="version", version=f"jobkit {__version__}")
    add_study_arguments(made)
    add_command_arguments(made)
    add_grid_arguments(made)
    add_launch_arguments(made)
    add_local_arguments(made)
    add_slurm_arguments(made)
    add_kubernetes_arguments(made)
    add_recipe_argument(made)
    add_spec_arguments(made, skip=("strategy", "repeat"))
    return made


def add_study_arguments(made: argparse.ArgumentParser) -> None:
    """Add the options that say which runs a study has."""
    group = made.add_argument_group("study")
    known = ", ".join(sorted(p.stem for p in STUDIES.glob("*.toml")))
    group.add_argument(
        "--study",
        metavar="FILE",
        help=f"a TOML file, or one of: {known} (default {DEFAULT_STUDY}, or the command after --)",
    )
    group.add_argument("--name", help="name of the folder under logs/ (default: that of the study)")
    group.add_argument("--strategies", nargs="+", metavar="NAME", help="strategies to compare")
    group.add_argument(
        "--gpus",
        nargs="+",
        metavar="N",
        help="sizes: total ranks (one per GPU; processes on a CPU), or NODESxRANKS",
    )
    group.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="ranks on a full node; on Slurm also its GPUs, where the site's profile has no number",
    )
    group.add_argument("--repeats", type=int, metavar="N", help="repeats of each setting")


def _launcher(text: str) -> str:
    """A type for argparse: one of LAUNCHERS, with the way to use another one."""
    if text in LAUNCHERS:
        return text
    known = f"'{text}': choose from {', '.join(LAUNCHERS)}"
    other = {"mpirun": "mpirun -n {ranks} ./train", "mpiexec": "mpiexec -n {ranks} ./train"}
    other |= {"accelerate": "accelerate launch train.py", "deepspeed": "deepspeed train.py"}
    if text in other:
        known += f"; {text} starts the ranks itself: --launcher once -- {other[text]}"
    raise argparse.ArgumentTypeError(known)


def add_command_arguments(made: argparse.ArgumentParser) -> None:
    """Add the options of a study of a command."""
    group = made.add_argument_group(
        "command", "Only for a command after --, or a study file that has one."
    )
    group.add_argument(
        "--launcher",
        type=_launcher,
        metavar="{srun,torchrun,once}",
        help="what starts its ranks: srun (default; one process per rank), torchrun (one agent "
        "per node), once (one process on the first node, which starts its own ranks)",
    )
    group.add_argument("--unit", metavar="TEXT", help="what a step works on, as images or tokens")
    group.add_argument(
        "--work-per-step",
        metavar="X",
        help="units of work in one optimizer step over all ranks, as 512 or '{32 * ranks}'",
    )
    group.add_argument(
        "--together",
        action="store_true",
        help="the ranks share the work without a word to each other: compare their sizes though "
        "nothing shows that they work together",
    )
    group.add_argument(
        "--pattern", metavar="NAME", help="format of its log, for a program that cannot be changed"
    )
    group.add_argument(
        "--no-auto",
        action="store_false",
        default=None,
        dest="auto",
        help="do not count the steps of torch's optimizers",
    )


def add_launch_arguments(made: argparse.ArgumentParser) -> None:
    """Add the options of a launch, on this machine or on Slurm."""
    group = made.add_argument_group("launch")
    group.add_argument(
        "--site",
        help=f"where to run: local (this machine), slurm, {', '.join(known_sites())}, or a TOML "
        "file (default: this cluster's, where there is Slurm, else local)",
    )
    group.add_argument(
        "--max-running",
        type=int,
        metavar="N",
        help="concurrent runs (default: 1 on this machine, no limit on Slurm)",
    )
    group.add_argument(
        "--only", choices=("missing", *BAD_ENDS), help="start only the runs with this status"
    )
    group.add_argument(
        "--max-restarts",
        type=at_least(int, 0),
        metavar="N",
        help="how often a run is started again: on Slurm after it was stopped early with a "
        f"checkpoint (default {MAX_RESTARTS}) or crashed (default 0), on this machine after either "
        "(default 0)",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print each command; write and start nothing"
    )
    group.add_argument("--no-wait", action="store_true", help="return without waiting for the runs")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:end])
    args.command = _command(words[end:])
    return run(args)


def _command(words: Sequence[str]) -> tuple[str, ...]:
    """The command after --, if there is one. Raises UsageError for options of sbatch there."""
    if len(words) == 1:
        raise UsageError("-- needs a command after it, as: -- python train.py")
    if words and words[1].startswith("-"):
        option = words[1]
        raise UsageError(
            f"'{option}': a command comes after --; write an option of sbatch as --sbatch {option}"
        )
    return tuple(words[1:])


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan that the arguments describe, on nodes as the site has them. Raises UsageError."""
    own = ("name", "strategies", "gpus", "gpus_per_node", "repeats", "launcher", "pattern", "auto")
    given: dict[str, Any] = {k: getattr(args, k) for k in own if getattr(args, k) is not None}
    work = {"unit": args.unit, "per_step": args.work_per_step, "together": args.together}
    given |= {"work": stated} if (stated := {k: v for k, v in work.items() if v}) else {}
    study = _study(args, given | given_settings(args))
    study = with_words(study, args.sweep, args.parameter, given=vars(args))
    site = find_site(args.site, ask=not args.dry_run)
    if site is not None and study.gpus_per_node is None:
        study = study.changed(gpus_per_node=site.gpus_per_node)
    notes: list[str] = []
    if site is None and not (args.to or args.command or args.gpus) and args.study in _FIT_HERE:
        study, notes = _that_fit_here(study)
    plan = study.expand()
    return replace(plan, notes=(*notes, *plan.notes))


def _that_fit_here(study: Study) -> tuple[Study, list[str]]:
    """The study without its sizes beyond this machine's GPUs, or else its cores, and a note."""
    gpus = 0 if study.settings.get("device") == "cpu" else count_gpus()
    cores = len(os.sched_getaffinity(0))
    most, what = (gpus, "GPU") if gpus else (cores, "core")
    sizes = zip(study.gpus, study.sizes(), strict=True)
    kept = tuple(n for n, (_, ranks) in sizes if ranks <= most)
    if not kept or kept == study.gpus:
        return study, []
    left_out = ", ".join(str(n) for n in study.gpus if n not in kept)
    note = (
        f"this machine has {most} {what}{'s' * (most > 1)}: sizes {left_out} of study "
        f"{study.name} are left out; say --gpus to run them"
    )
    return study.changed(gpus=kept), [note]


def _study(args: argparse.Namespace, given: Mapping[str, Any]) -> Study:
    """The study of the command after --, else the one that was named."""
    if not args.command:
        return Study.load(args.study or DEFAULT_STUDY, **given)
    if args.study:
        return Study.load(args.study, command=args.command, **given)
    return Study.of_command(args.command, **given)


def make_request(args: argparse.Namespace) -> LaunchRequest:
    """The settings of the launch from the arguments. Raises UsageError."""
    names = {f"sbatch_{name}": name for name in (*OVERRIDES, "exclusive")}
    given = {name: getattr(args, dest) for dest, name in names.items() if getattr(args, dest)}
    return LaunchRequest(
        site=args.site,
        at_once=args.max_running,
        detach=args.no_wait,
        only=args.only,
        options={**given, **verbatim(args.sbatch)},
        collect=not args.no_collect,
        within_allocation=args.within_allocation,
        max_node_hours=args.max_node_hours,
        max_restarts=args.max_restarts,
        gpus_per_node=args.gpus_per_node,
        gpu_request=args.gpu_request,
        torchrun=tuple(
            word
            for name in ("monitor_interval", "start_timeout")
            if (value := getattr(args, name)) is not None
            for word in ("--" + name.replace("_", "-"), f"{value:.3f}")
        ),
    )


def run(args: argparse.Namespace) -> int:
    """Run the study that the arguments describe; return the exit code."""
    manifests, plan, request = kubernetes_options(args), make_plan(args), make_request(args)
    if manifests:
        from jobkit.launch.kubernetes.write import to_kubernetes

        return to_kubernetes(plan, manifests, request, args.dry_run)
    if args.dry_run:
        return dry_run(plan, request)
    # --help needs neither rich nor submitit.
    from jobkit.launch.follow.foreground import Foreground
    from jobkit.launch.launcher import launch, under_way

    started = launch(plan, request)
    shown = Foreground(started)
    shown.announce()
    if started.runs and not args.no_wait:
        return shown.follow()
    states = started.states()
    active = started.runs or under_way(states)  # of this launch, or of an earlier one
    return shown.next_steps() if active else shown.conclude(states)
