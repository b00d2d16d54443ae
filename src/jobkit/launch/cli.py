"""`python run_benchmarks.py`: expands a study, starts its missing runs, and follows them."""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from jobkit import __version__
from jobkit.errors import Parser, UsageError, at_least, command
from jobkit.gpus import count_gpus
from jobkit.launch.command import LaunchRequest
from jobkit.launch.kubernetes import add_kubernetes_arguments, kubernetes_options, to_kubernetes
from jobkit.launch.launcher import dry_run, prepare, start
from jobkit.launch.site import GPU_REQUESTS, known_sites
from jobkit.launch.slurm_cluster import find_site
from jobkit.launch.slurm_options import OVERRIDES, verbatim
from jobkit.launch.start import MAX_RESTARTS
from jobkit.launch.states import counted
from jobkit.outcome.state import UNDER_WAY
from jobkit.permissions import closed_to_others
from jobkit.spec import options as spec_options
from jobkit.spec.command import LAUNCHERS, SCALINGS, STARTERS
from jobkit.spec.study import STUDIES, Plan, Study, find_study

DEFAULT_STUDY = "strong"
_FIT_HERE = (None, "threads")  # studies whose sizes are those of this machine, off Slurm
_TOPICS = {  # of the help, beside what most people need
    "slurm": "options for runs on Slurm, which override the site's: -A, -p, --time and others",
    "kubernetes": "options for Kubernetes",
    "training": "options of jobkit's own training, as --epochs: a command after -- takes none",
}
# What other launchers call the sizes of a study.
_SIZES = ["-n", "-np", "-N", "--np", "--nproc", "--nproc-per-node"]
_SIZES += ["--ntasks", "--nodes", "--ranks", "--sizes"]
DESCRIPTION = (
    "Run a study: the same training at several sizes, jobkit's own under several strategies or "
    "any other program's."
)
EPILOG = """examples:
  python run_benchmarks.py --study demo                  a first look, on any machine
  python run_benchmarks.py --study strong --dry-run      print each command, write nothing
  python run_benchmarks.py --strategies ddp fsdp --gpus 1 2 --repeats 3 --epochs 3
  python run_benchmarks.py --gpus 4 8 16 --gpus-per-node 4 -A project --sbatch --nice=100
  python run_benchmarks.py --gpus 1 2 4 --unit images --work-per-step 512 -- \\
      python train.py --batch-size '{512 / ranks}' --out '{run_dir}'

After -- comes the command of any training program; it is started in the current folder, on each
rank with torchrun's variables. {ranks}, {nodes}, {ranks_per_node} and {repeat} in it are numbers,
{run_dir} is the run's own folder; {512 / ranks} must divide; {{ is a brace.

Without --study and without a command the study is 'strong'. On this machine its runs start one
after the other; on Slurm nothing is submitted until a study or sizes are named.
Run the same command again to start only the runs that are missing or failed.
Exit codes: 0 all runs are ok, 1 one is not, 2 wrong usage, 3 not all submitted, 130, 143 stopped.
"""


class StudyParser(Parser):
    """The parser of run_benchmarks.py: --sbatch takes any word, and wrong words have a hint."""

    has_command = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take a value of --sbatch that begins with -, which argparse has for an option."""
        joined: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            if joined and joined[-1] == "--sbatch":
                joined[-1] = f"--sbatch={word}"
            else:
                joined.append(word)
        return super().parse_known_args(joined, namespace)

    def _hint(self, words: str) -> str:
        """What may have been meant by words that the parser does not know."""
        first = words.split()[0].partition("=")[0]
        if first in _SIZES:
            return "; say the sizes of the study as --gpus 1 2 4, or as NODESxRANKS: --gpus 2x4"
        known = self._option_string_actions
        if self.has_command and not difflib.get_close_matches(first, known, 1, cutoff=0.8):
            return f"; an option of your program comes after it: -- python train.py {words}"
        return super()._hint(words)


class _HelpOf(argparse.Action):
    """--help-slurm and others: prints the options of a topic, and ends."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        make_parser(parser.has_command, str(option).removeprefix("--help-")).print_help()
        parser.exit()


def make_parser(has_command: bool = False, topic: str = "") -> StudyParser:
    """The command line of run_benchmarks.py, whose help is of one topic.

    has_command: a command comes after --, which takes no option of a training.
    """
    options = StudyParser(
        prog="run_benchmarks.py",
        usage="%(prog)s [options] [-- command]",
        description=f"The {_TOPICS[topic]}." if topic else DESCRIPTION,
        epilog=None if topic else EPILOG,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=28),
    )
    options.has_command = has_command
    options.add_argument("--version", action="version", version=f"jobkit {__version__}")
    for name, text in _TOPICS.items():
        options.add_argument(f"--help-{name}", action=_HelpOf, nargs=0, help=f"print the {text}")
    bounds = [0]  # of the topics among the groups
    for add in (_add_main_arguments, _add_slurm_arguments, add_kubernetes_arguments):
        add(options)
        bounds.append(len(options._action_groups))
    if not has_command:
        spec_options.add_recipe_argument(options.add_argument_group("recipe"))
        spec_options.add_spec_arguments(options, skip=("strategy", "repeat"))
    at = ["", *_TOPICS].index(topic)
    options._action_groups = options._action_groups[bounds[at] : [*bounds, None][at + 1]]
    return options


def _begin_group(options: Parser, title: str) -> Callable[..., None]:
    """A function that adds an option to a new group: name, help, what its value is called."""
    group = options.add_argument_group(title)

    def add(name: str, text: str, value: str | None = "N", *short: str, **more: Any) -> None:
        more |= {"metavar": value} if value else {}
        group.add_argument(name, *short, help=text, **more)

    return add


def _add_main_arguments(options: StudyParser) -> None:
    """Add what most people need: which runs a study has, its command, where and how it starts."""
    known = ", ".join(sorted(path.stem for path in STUDIES.glob("*.toml")))
    sites = ", ".join(known_sites())
    add = _begin_group(options, "study")
    add("--study", f"a TOML file, or one of: {known} (default {DEFAULT_STUDY}, or the command "
        "after --)", "FILE")  # fmt: skip
    add("--name", "name of the folder under logs/ (default: the study's)", "NAME")
    add("--strategies", "strategies to compare", "NAME", nargs="+")
    sizes = "sizes: ranks in all (one per GPU; processes on a CPU), or NODESxRANKS"
    add("--gpus", sizes, nargs="+")
    add("--gpus-per-node", "ranks on a full node; on Slurm also its GPUs, where the site does not "
        "say", type=int)  # fmt: skip
    add("--repeats", "repeats of each setting", type=int)
    add = _begin_group(options, "command (after --, or in a study file)")
    add("--launcher", "what starts its ranks: srun (default; one process per rank), torchrun (one "
        "agent per node), once (one process on the first node, which starts its own ranks)",
        "NAME", type=_launcher, choices=LAUNCHERS)  # fmt: skip
    add("--unit", "what a step works on, as images or tokens", "TEXT")
    add("--work-per-step", "units of work in one optimizer step over all ranks, as 512 or "
        "'{32 * ranks}'", "X")  # fmt: skip
    add("--scaling", "strong: the work of a step is fixed over all ranks; weak: per rank", None,
        choices=SCALINGS)  # fmt: skip
    add("--together", "the ranks share the work though they exchange nothing: compare their sizes",
        None, action="store_true")  # fmt: skip
    add("--pattern", "format of its log, where it prints its own numbers", "NAME")
    add("--no-auto", "do not count the steps of torch's optimizers", None, action="store_false",
        default=None, dest="auto")  # fmt: skip
    if options.has_command:  # else it is an option of jobkit's own training
        add("--why", "steps profiled at each of a few places (default 5; 0: none)",
            type=at_least(int, 0), default=argparse.SUPPRESS)  # fmt: skip
    add = _begin_group(options, "grid")
    add("--sweep", "one run for each value of a setting, or of a placeholder {NAME} of the command",
        "NAME=V1,V2", nargs="+", action="extend", default=[])  # fmt: skip
    add = _begin_group(options, "launch")
    add("--site", f"where to run: local (this machine), slurm, {sites}, or a TOML file (default: "
        "this cluster's, where there is Slurm, else local)", "NAME")  # fmt: skip
    add("--max-running", "on Slurm: runs of each size at a time (default: no limit); on this "
        "machine it is 1", type=int, dest="at_once")  # fmt: skip
    add("--max-restarts", "starts of a run after its first one: on Slurm after an early stop with "
        f"a checkpoint (default {MAX_RESTARTS}) or a crash (default 0), here after either (default "
        "0)", type=at_least(int, 0))  # fmt: skip
    add("--dry-run", "print each command; start nothing", None, action="store_true")
    add("--no-wait", "return without waiting for the runs", None, action="store_true",
        dest="detach")  # fmt: skip


def _launcher(text: str) -> str:
    """A type for argparse, which says how programs that start ranks themselves are started."""
    if text in STARTERS and text not in LAUNCHERS:
        fix = f"--launcher once -- {text} {'-n {ranks} ' * text.startswith('mpi')}..."
        raise argparse.ArgumentTypeError(f"'{text}' starts the ranks itself: {fix}")
    return text


def _add_slurm_arguments(options: StudyParser) -> None:
    add = _begin_group(options, "Slurm")
    add("--sbatch", "pass an option through to sbatch, as --sbatch --nice=100; repeatable",
        "OPTION", action="append", default=[])  # fmt: skip
    for name, (short, text) in OVERRIDES.items():
        add(f"--{name}", text, "X", *([short] if short else []), dest=f"sbatch_{name}")
    add("--gpu-request", "how GPUs are asked for, one per rank; none: whole nodes are allocated "
        f"(default: the site's way): {', '.join(GPU_REQUESTS)}", "WAY",
        choices=GPU_REQUESTS)  # fmt: skip
    add("--exclusive", "allocate whole nodes", None, action="store_true", dest="sbatch_exclusive")
    add("--within-allocation", "run all in one allocation of the largest size, one after the other",
        None, action="store_true")  # fmt: skip


@command
@closed_to_others()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = make_parser(has_command=end < len(words)).parse_args(words[:end])
    args.command = _command(words[end:])
    manifests, plan = kubernetes_options(args), make_plan(args)
    sbatch = {name: getattr(args, f"sbatch_{name}") for name in (*OVERRIDES, "exclusive")}
    options = {**{name: v for name, v in sbatch.items() if v}, **verbatim(args.sbatch)}
    names = {field.name for field in fields(LaunchRequest)} - {"options"}
    request = LaunchRequest(options=options, **{name: getattr(args, name) for name in names})
    if manifests:
        return to_kubernetes(plan, manifests, request, args.dry_run)
    if args.dry_run:
        return dry_run(plan, request)
    from jobkit.launch.view import Foreground  # --help needs no rich

    prepared = prepare(plan, request)
    shown = Foreground(prepared)
    shown.announce()
    if not any((args.study, args.command, args.gpus, args.strategies, args.name, args.sweep)):
        if prepared.site is not None:
            submit = f"python run_benchmarks.py --study {DEFAULT_STUDY}"
            what = f"no study was named, so nothing was submitted; to submit these runs: {submit}"
            raise UsageError(f"{what}; a first look: --study demo")
        print("smaller: --study demo; only the commands: --dry-run; end it with Ctrl-C", flush=True)
    start(prepared)
    shown.started()
    if prepared.where and not request.detach:
        return shown.follow()
    # Runs of this launch go on, or of an earlier one.
    states = prepared.states()
    active = prepared.where or any(state.status in UNDER_WAY for state in states.values())
    return shown.next_steps() if active or prepared.left else shown.conclude()


def _command(words: Sequence[str]) -> tuple[str, ...]:
    """The command after --, if there is one. Raises UsageError for options of sbatch there."""
    if len(words) == 1:
        raise UsageError("-- needs a command after it, as: -- python train.py")
    if words and (option := words[1]).startswith("-"):
        write = f"write an option of sbatch as --sbatch {option}"
        raise UsageError(f"'{option}': a command comes after --; {write}")
    return tuple(words[1:])


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan that the arguments describe, on nodes as the site has them. Raises UsageError."""
    names = ["name", "strategies", "gpus", "gpus_per_node", "repeats"]
    names += ["launcher", "pattern", "auto"]
    changes: dict[str, Any] = {k: getattr(args, k) for k in names if getattr(args, k) is not None}
    work = {"per_step": args.work_per_step}
    work |= {name: getattr(args, name) for name in ("unit", "scaling", "together")}
    changes |= {"work": stated} if (stated := {k: v for k, v in work.items() if v}) else {}
    changes |= spec_options.chosen_settings(args)
    if args.command and not args.study:
        study = Study.of_command(args.command, **changes)
    elif changes.keys() == {"name"} and not args.study and not args.sweep:
        study = Plan.read(find_study(args.name, planned=True) / "plan.json").study  # which goes on
    else:
        changes |= {"command": args.command} if args.command else {}
        study = Study.load(args.study or DEFAULT_STUDY, **changes)
    study = spec_options.with_words(study, args.sweep)
    site = find_site(args.site)
    if site is not None and study.gpus_per_node is None:
        study = study.changed(gpus_per_node=site.gpus_per_node)
    notes: list[str] = []
    if site is None and not (args.to or args.command or args.gpus) and args.study in _FIT_HERE:
        study, notes = _fit_here(study)
    plan = study.expand()
    return replace(plan, notes=(*notes, *plan.notes))


def _fit_here(study: Study) -> tuple[Study, list[str]]:
    """The study without its sizes beyond this machine's GPUs, or else its cores, and a note."""
    gpus = 0 if study.settings.get("device") == "cpu" else count_gpus()
    limit, what = (gpus, "GPU") if gpus else (len(os.sched_getaffinity(0)), "core")
    pairs = zip(study.gpus, study.sizes(), strict=True)
    fitting = tuple(n for n, (_, ranks) in pairs if ranks <= limit)
    if not fitting or fitting == study.gpus:
        return study, []
    sizes = ", ".join(str(n) for n in study.gpus if n not in fitting)
    why = f"this machine has {counted(limit, what)}"
    note = f"{why}: sizes {sizes} of study {study.name} are left out; say --gpus to run them"
    return study.changed(gpus=fitting), [note]
