"""The commands collect_results.py and plot_results.py.

pandas, matplotlib and rich are imported only where they are needed: --help stays fast.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.analysis.scaling import MIN_EFFICIENCY
from jobkit.errors import Exit, Parser, UsageError, at_least, command, positive, share
from jobkit.metric.pattern import PATTERNS, load_pattern
from jobkit.paths import StudyPaths, short_path, write_json
from jobkit.permissions import closed_to_others

if TYPE_CHECKING:
    from jobkit.analysis.collect.logs import GivenLogs
    from jobkit.analysis.collect.results import Results

_COLLECT = """examples:
  python collect_results.py                     the newest study
  python collect_results.py logs/demo           or just: demo
  python collect_results.py demo --json | jq .not_ok
  python collect_results.py --logs slurm-*.out --pattern nanogpt --size 'ranks=(?P<ranks>\\d+)'
                                                tables of logs that exist already
  python collect_results.py demo --min-efficiency 0.85 --at 4    for scripts: exit code 4 if not met

exit codes:
  0  every planned run is ok
  2  wrong usage: no such study, no such size, a folder that cannot be written
  3  collected, but a run is not ok
  4  collected, but --min-efficiency is not met (whether or not every run is ok)
"""
_PLOT = """examples:
  python plot_results.py                        the newest study
  python plot_results.py logs/demo              or just: demo
  python plot_results.py demo --collect         what ./plot_results.sh does
  python plot_results.py demo --forecast 16 32 64
  python plot_results.py demo --forecast 16 --gpus-per-node 4    measured on one node of 4 GPUs
  python plot_results.py strong --forecast 64 --comm logs/comm/job-42/comm.csv
  python plot_results.py demo --work '90 epochs' --runs 5    hours of a whole project

the report begins with five lines, as:
  Request 16 GPUs on 4 nodes with ddp: 12.9 times 1 GPU, parallel efficiency 81% [79.9, 82 at
  95%], 142 s and 0.16 node-hours per epoch; undecided whether above 80%: repeat 1 and 16 GPUs.

exit codes:
  0  the figures and the report were made
  2  wrong usage: no such study, too few sizes for a forecast, a folder that cannot be written
  3  --collect: a run is not ok; or no run has a rate, and no figure was made
"""


def _parser(prog: str, description: str, epilog: str) -> Parser:
    """The part of the command line that both commands share."""
    parser = Parser(prog=prog, description=description, epilog=epilog)
    text = "a study's folder, as logs/demo, or its bare name (default: the newest study)"
    parser.add_argument("study", nargs="?", metavar="STUDY", help=text)
    text = "write into this folder, as for the study of another user (default: the study's)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "target validation accuracy (default: one that all successful runs have reached)"
    parser.add_argument("--accuracy", type=share, metavar="SHARE", help=text)
    return parser


@command
@closed_to_others()
def collect_main(argv: Sequence[str] | None = None) -> int:
    """Write the tables of a study and print its summary; return the exit code."""
    text = "Collect the logs of a study into tables (CSV) and print a summary."
    parser = _parser("collect_results.py", text, _COLLECT)
    add = parser.add_argument
    add("--json", action="store_true", help="print the summary as JSON instead")
    text = "exit with 4 if a series has a lower parallel efficiency than this, with --at"
    add("--min-efficiency", type=share, metavar="SHARE", help=text)
    text = "the number of ranks at which --min-efficiency is checked"
    add("--at", type=at_least(int, 1), metavar="RANKS", help=text)
    _add_log_options(parser)
    args = parser.parse_args(argv)
    if (args.at is None) != (args.min_efficiency is None):
        raise UsageError("--min-efficiency and --at go together")

    from jobkit.analysis.collect.results import collect
    from jobkit.analysis.report.summary import as_json, print_summary, print_verdict
    from jobkit.analysis.scaling.scaling import check_efficiency

    study, logs = args.study, _given_logs(args)
    if logs:
        study = _logs_folder(args.name, sys.argv[1:] if argv is None else argv)
    results = collect(study, accuracy=args.accuracy, logs=logs, out=args.out)
    least, at = args.min_efficiency, args.at
    missed, unsure = check_efficiency(results.sizes, least, at) if at else ([], [])
    if args.json:
        print(as_json(results))
    else:
        print_summary(results)
        print_verdict(results, MIN_EFFICIENCY)
        print(f"wrote tables to {short_path(results.output.folder)}")
        if results.runs["throughput"].notna().any():
            follow = ["next:", "jobkit", "plot", short_path(results.folder)]
            print(shlex.join(follow + (["--out", short_path(results.out)] if results.out else [])))
    lines = [f"threshold not met: {line}" for line in missed]
    for line in lines + [f"threshold undecided: {line}" for line in unsure]:
        print(line, file=sys.stderr)
    if missed:
        return Exit.THRESHOLD
    return Exit.OK if results.ok else Exit.INCOMPLETE


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of collect for logs that exist already."""
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


def _given_logs(args: argparse.Namespace) -> "GivenLogs | None":
    """The logs that collect's options name; None for a study. Raises UsageError."""
    if not args.logs:
        names = ("size", "pattern", "gpus_per_node", "scaling", "name", "unit", "work_per_step")
        for name in (*names, "warmup_steps"):
            if getattr(args, name):
                raise UsageError(f"--{name.replace('_', '-')} has no effect without --logs")
        return None

    from jobkit.analysis.collect.logs import GivenLogs, size_of

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


def _logs_folder(name: str | None, words: Sequence[str]) -> Path:
    """The folder of the tables, made, with the command in logs.json.

    Raises UsageError where it has a plan.
    """
    paths = StudyPaths.named(name or "from-logs")
    if paths.plan.exists():
        raise UsageError(f"{paths.folder} is a study with a plan: give another --name")
    paths.folder.mkdir(parents=True, exist_ok=True)
    write_json(paths.given_logs, {"v": 2, "command": shlex.join(["collect_results.py", *words])})
    return paths.folder


@command
@closed_to_others()
def plot_main(argv: Sequence[str] | None = None) -> int:
    """Draw the figures of a study and write its report; return the exit code."""
    text = "Draw the figures of a study (PNG, SVG, PDF) and write report.html from its tables. "
    text += "A study without tables is collected first."
    parser = _parser("plot_results.py", text, _PLOT)
    add, count = parser.add_argument, at_least(int, 1)
    text = "collect the logs first, as collect_results.py does; --accuracy is for that"
    add("--collect", action="store_true", help=text)
    add("--open", action="store_true", help="open the report, where there is a display")
    text = "predict these sizes from the fitted scaling laws, marked as not measured"
    add("--forecast", type=count, nargs="+", default=[], metavar="RANKS", help=text)
    text = "ranks of a full node, for --forecast (default: as in the sizes on several nodes)"
    add("--gpus-per-node", type=count, metavar="N", help=text)
    text = "parallel efficiency of the size that the report recommends (default %(default)s)"
    add("--min-efficiency", type=share, default=MIN_EFFICIENCY, metavar="SHARE", help=text)
    text = "links that jobkit comm measured, on one size or on several, for --forecast"
    add("--comm", type=Path, nargs="+", default=[], metavar="COMM.csv", help=text)
    text = "a run's work, as '300e9 tokens' or '90 epochs': GPU-hours and node-hours of it all"
    add("--work", metavar="AMOUNT", help=text)
    add("--runs", type=count, default=1, metavar="N", help="runs of --work (default 1)")
    args = parser.parse_args(argv)

    if (args.gpus_per_node or args.comm) and not args.forecast:
        raise UsageError("--gpus-per-node and --comm have no effect without --forecast")
    if args.accuracy and not args.collect:
        raise UsageError("--accuracy has no effect without --collect")

    from jobkit.analysis.collect.results import OUTDATED, Results, collect, make_own
    from jobkit.analysis.report.summary import print_summary

    if args.out:
        make_own(args.out)
    if args.collect:
        results = collect(args.study, accuracy=args.accuracy, out=args.out)
        print_summary(results)
        print(f"wrote tables to {short_path(results.output.folder)}")
    else:
        results = Results.load(args.study, args.out)
    make_own(results.output.folder)
    shown = short_path(results.folder)
    if not args.collect and results.is_outdated:
        print(f"{shown}: {OUTDATED}", file=sys.stderr)
    if results.epochs.empty and results.runs["throughput"].isna().all():
        states = ", ".join(f"{n} {s}" for s, n in results.runs["status"].value_counts().items())
        print(f"{shown}: no run has a rate ({states}): no figure", file=sys.stderr)
        return Exit.INCOMPLETE
    _draw(results, args)
    on_mac = sys.platform == "darwin"
    display = on_mac or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    opener = shutil.which("open" if on_mac else "xdg-open")
    if args.open and opener and display:
        report, null = short_path(results.output.report), subprocess.DEVNULL
        subprocess.Popen([opener, report], stdin=null, stdout=null, stderr=null)
    return Exit.INCOMPLETE if args.collect and not results.ok else Exit.OK


def _draw(results: "Results", args: argparse.Namespace) -> None:
    """Forecast, draw the figures, write the report and print what it begins with."""
    from jobkit.analysis.figures.draw import draw
    from jobkit.analysis.figures.style import FORMATS, unit
    from jobkit.analysis.findings import forecast
    from jobkit.analysis.report.report import write_report
    from jobkit.analysis.report.summary import print_table, print_verdict, terminal
    from jobkit.analysis.report.tables import forecast_rows, project_table
    from jobkit.analysis.tables.frames import save_table
    from jobkit.analysis.tables.text import counted
    from jobkit.metric.comm import fit_lines, read_csv

    path, forecasts, reasons = results.output.forecast, list[forecast.Forecast](), list[str]()
    if args.forecast:
        lines = [line for path in args.comm for line in fit_lines(read_csv(path))]
        links = forecast.links_of(lines) if args.comm else None
        forecasts, reasons = forecast.forecasts(results, args.forecast, args.gpus_per_node, links)
        if not forecasts:
            why = "; ".join(reasons) or "no series has sizes to compare"
            raise UsageError(f"no forecast: {why}")
        for why in reasons:
            print(f"no forecast: {why}", file=sys.stderr)
    of, efficiency, project = unit(results), args.min_efficiency, None
    if args.work:
        project = project_table(results, args.work, args.runs, of, forecasts, efficiency)
    if forecasts:
        save_table(path, forecast.forecast_table(results, forecasts))
        rows = forecast_rows(results, forecasts, (), of)
        print("forecast (not measured):")
        print_table(terminal(), rows)
        print("\n".join([*rows.notes, f"wrote {short_path(path)}"]))
    else:
        path.unlink(missing_ok=True)
    drawn = draw(results, forecasts)
    count, formats = counted(len(drawn) // len(FORMATS), "figure"), ", ".join(FORMATS).upper()
    print_verdict(results, efficiency)
    print(f"wrote {count} ({formats}) to {short_path(results.output.figures)}")
    written = write_report(results, drawn, forecasts, reasons, efficiency, project)
    print(f"wrote {', '.join(p.name for p in written)} to {short_path(results.output.folder)}")
    print(f"next: open {short_path(written[-1])} in a browser")
