"""The options of collect about logs of other programs."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import UsageError, at_least, positive
from jobkit.paths import StudyPaths, write_json

if TYPE_CHECKING:
    from jobkit.analysis.collect.logs import GivenLogs


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of collect for logs that exist already."""
    from jobkit.metric.pattern import PATTERNS

    text = "Each file is a run; STUDY is not given then."
    add = parser.add_argument_group("logs without a plan", text).add_argument
    add("--logs", nargs="+", metavar="FILE", help="the logs")
    known = ", ".join(sorted(p.stem for p in PATTERNS.glob("*.toml")))
    text = f"how lines are read: {known}, or a TOML file (default: [METRIC] key=value lines)"
    add("--pattern", metavar="NAME", help=text)
    text = "finds each log's size, in its name or its text: a group named ranks or, with "
    text += "--gpus-per-node, nodes; a group series names its curve"
    add("--size", metavar="REGEX", help=text)
    text = "ranks (GPUs) of a full node"
    add("--gpus-per-node", type=at_least(int, 1), metavar="N", help=text)
    text = "strong: the work is the same at each size; weak: it grows with the ranks"
    add("--scaling", choices=("strong", "weak"), help=text)
    add("--name", help="name of the folder under logs/ (default: from-logs)")
    add("--unit", help="unit of a step's work, with --work-per-step: as tokens")
    text = "units of work in one optimizer step over all ranks, where no line says it"
    add("--work-per-step", type=positive, metavar="N", help=text)
    text = "steps after the first line that are not compared (default 0); that line never is"
    add("--warmup-steps", type=at_least(int, 0), default=0, metavar="N", help=text)


def given_logs(args: argparse.Namespace) -> "GivenLogs | None":
    """The logs that collect's options name; None for a study. Raises UsageError."""
    names = ["size", "pattern", "gpus_per_node", "scaling", "name", "unit", "work_per_step"]
    for name in () if args.logs else (*names, "warmup_steps"):
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} has no effect without --logs")
    if not args.logs:
        return None
    from jobkit.analysis.collect.logs import GivenLogs, size_of
    from jobkit.metric.pattern import load_pattern

    if args.study:
        raise UsageError("give STUDY or --logs, not both")
    if not args.size:
        raise UsageError("--logs needs --size: an expression that finds each log's number of ranks")
    if absent := [word for word in args.logs if not Path(word).is_file()]:
        raise UsageError(f"--logs {absent[0]!r}: no such file; the shell fills in * without quotes")
    files = {path.resolve(): path.absolute() for path in map(Path, args.logs)}
    if args.scaling == "weak" and args.work_per_step:
        why = "is of all ranks, and grows with them in weak scaling: leave it out"
        raise UsageError(f"--work-per-step {why}, and the steps of all ranks are compared")
    given = GivenLogs(
        files=tuple(files.values()),
        size=args.size,
        pattern=load_pattern(args.pattern) if args.pattern else None,
        ranks_per_node=args.gpus_per_node,
        unit=args.unit,
        work_per_step=args.work_per_step,
        warmup_steps=args.warmup_steps,
        scaling=args.scaling,
    )
    # The reason of a run whose log is closed says that.
    if not any(size_of(path, given) or not os.access(path, os.R_OK) for path in given.files):
        raise UsageError(f"--size {given.size!r} finds no number of ranks in any log or its name")
    return given


def logs_folder(name: str | None, words: Sequence[str]) -> Path:
    """The folder of the tables, made, with the command in logs.json.

    Raises UsageError where it has a plan.
    """
    paths = StudyPaths.named(name or "from-logs")
    if paths.plan.exists():
        raise UsageError(f"{paths.folder} is a study with a plan: give another --name")
    paths.folder.mkdir(parents=True, exist_ok=True)
    write_json(paths.given_logs, {"v": 2, "command": shlex.join(["collect_results.py", *words])})
    return paths.folder
