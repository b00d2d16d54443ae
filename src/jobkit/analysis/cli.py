"""The commands collect_results.py and plot_results.py.

pandas, matplotlib and rich are imported only where they are needed: --help stays fast.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jobkit.errors import Exit, UsageError
from jobkit.permissions import closed_to_others

if TYPE_CHECKING:
    from jobkit.analysis.collect.results import Results
    from jobkit.analysis.findings.forecast import Forecast
    from jobkit.analysis.tables.text import TextTable

_COLLECT = """examples:
  python collect_results.py                     the newest study
  python collect_results.py logs/demo           or just: demo
  python collect_results.py demo --json | jq .not_ok
  python collect_results.py demo --min-efficiency 0.85 --at 4    a gate for a script

exit codes:
  0  every planned run is ok
  2  wrong usage: no such study, no such size, a folder that cannot be written
  3  collected, but a run is not ok
  4  collected, but --min-efficiency is not met (whether or not every run is ok)
"""
_PLOT = """examples:
  python plot_results.py                        the newest study
  python plot_results.py logs/demo              or just: demo
  python plot_results.py demo --forecast 16 32 64
  python plot_results.py strong --step-model logs/comm/job-42/comm.json

exit codes:
  0  the figures and the report were made
  2  wrong usage: no such study, too few sizes for a forecast, a folder that cannot be written
  3  no run has finished an epoch: no figure was made
"""
_OF_SIZES = ("speed_up", "efficiency")  # figures of which one size is no line


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line, like every other error here."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    made = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "study",
        nargs="?",
        metavar="STUDY",
        help="a study's folder, as logs/demo, or its bare name (default: the newest study)",
    )
    return made


def collect_main(argv: Sequence[str] | None = None) -> int:
    """Write results.csv and epochs.csv of a study, print its summary; return the exit code."""
    return _guarded(_collect, argv)


@closed_to_others()
def plot_main(argv: Sequence[str] | None = None) -> int:
    """Draw the figures of a study; return the exit code."""
    return _guarded(_plot, argv)


def _guarded(command: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None) -> int:
    try:
        return command(argv)
    except UsageError as error:
        print(f"jobkit: error: {error}", file=sys.stderr)
        return Exit.USAGE


def _collect(argv: Sequence[str] | None) -> int:
    text = "Collect a study's plan and logs into tables (CSV), and sum them up."
    parser = _parser("collect_results.py", text, _COLLECT)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON instead")
    _add_thresholds(parser)
    args = parser.parse_args(argv)
    if (args.at is None) != (args.min_efficiency is None):
        raise UsageError("--min-efficiency and --at go together")

    from jobkit.analysis.collect.results import collect
    from jobkit.analysis.report.summary import as_json, print_summary
    from jobkit.analysis.scaling.gate import check_efficiency

    results = collect(args.study, accuracy=args.accuracy)
    if args.json:
        print(as_json(results))
        for line in results.warnings():
            print(f"warning: {line}", file=sys.stderr)
    else:
        print_summary(results)
        _say_written(results)
    missed = check_efficiency(results.scaling, args.min_efficiency, args.at) if args.at else []
    for line in missed:
        print(f"threshold not met: {line}", file=sys.stderr)
    if missed:
        return Exit.THRESHOLD
    return Exit.OK if results.ok else Exit.INCOMPLETE


def _say_written(results: "Results") -> None:
    """What was written, and what to do next."""
    kinds = ("run", "epoch", "size")
    for (path, table), what in zip(results.tables.items(), kinds, strict=True):
        print(f"wrote {_shown(path)} ({len(table)} {what}{'' if len(table) == 1 else 's'})")
    print(f"next: python plot_results.py {_shown(results.folder)}")


def _add_thresholds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accuracy",
        type=_share,
        metavar="SHARE",
        help="tell the time to this validation accuracy (default: what all runs have reached)",
    )
    parser.add_argument(
        "--min-efficiency",
        type=_share,
        metavar="SHARE",
        help="end with 4 where a series has less parallel efficiency than this, with --at",
    )
    parser.add_argument("--at", type=_count, metavar="RANKS", help="the size of --min-efficiency")


def _share(text: str) -> float:
    """A share above 0, up to 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be above 0 and at most 1, as 0.85")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be 1 or more")
    return value


_share.__name__, _count.__name__ = "number", "whole number"  # argparse says "invalid number value"


def _plot(argv: Sequence[str] | None) -> int:
    text = "Draw a study (figures as PNG and SVG) and write its report: report.html."
    parser = _parser("plot_results.py", text, _PLOT)
    parser.add_argument(
        "--forecast",
        type=_count,
        nargs="+",
        default=[],
        metavar="RANKS",
        help="extend the fitted curves to these sizes, marked as not measured",
    )
    parser.add_argument(
        "--min-efficiency",
        type=_share,
        default=0.8,
        metavar="SHARE",
        help="below it, the report says, more ranks do not pay (default %(default)s)",
    )
    parser.add_argument(
        "--step-model",
        type=Path,
        metavar="COMM.json",
        help="model the steps over the links that python -m jobkit comm measured, and hold the "
        "model against sizes that it was not fitted to",
    )
    args = parser.parse_args(argv)

    from jobkit.analysis.collect.results import collect

    results = collect(args.study, write=False)
    if results.epochs.empty:
        states = ", ".join(f"{n} {s}" for s, n in results.runs["status"].value_counts().items())
        shown = _shown(results.folder)
        print(f"{shown}: no run has finished an epoch ({states}): no figure", file=sys.stderr)
        return Exit.INCOMPLETE
    return _drawn(results, args.forecast, args.min_efficiency, args.step_model)


def _drawn(results: "Results", forecast: list[int], least: float, comm: Path | None = None) -> int:
    """Draw the figures and write the report, and say what was written."""
    from jobkit.analysis.figures.draw import draw
    from jobkit.analysis.report.report import write_report

    found = _forecasts(results, forecast)
    steps = _step_table(results, comm)
    drawn = draw(results, found)
    for path in (*drawn.paths, *write_report(results, drawn.paths, found, least, steps)):
        print(f"wrote {_shown(path)}")
    for name in drawn.skipped:
        why = "fewer than two measured sizes" if name in _OF_SIZES else "no run that is ok says it"
        print(f"no {name}: {why}", file=sys.stderr)
    return Exit.OK


def _step_table(results: "Results", comm: Path | None) -> "TextTable | None":
    """The step models over the links in a comm.json, printed; None where none was given."""
    if comm is None:
        return None
    from jobkit.analysis.findings.step_cli import read_links
    from jobkit.analysis.findings.step_model import step_lines, step_models, step_table

    found = step_models(results, read_links(comm))
    print("\n".join(step_lines(found)))
    return step_table(found)


def _forecasts(results: "Results", wanted: list[int]) -> "list[Forecast]":
    """The forecasts that were asked for, printed and written; an old table goes where none is."""
    from jobkit.analysis.findings.forecast import checked_forecasts, forecast_lines, forecast_table
    from jobkit.analysis.tables.products import save_table

    path = results.paths.forecast
    if not wanted:
        path.unlink(missing_ok=True)
        return []
    found = checked_forecasts(results, wanted)
    for refused in [f.refused for f in found if f.refused]:
        print(f"no forecast of {refused}", file=sys.stderr)
    table = forecast_table(results, found)
    save_table(path, table)
    print("\n".join(forecast_lines(table)))
    print(f"wrote {_shown(path)}")
    return found


def _shown(path: Path) -> str:
    """A path as short as it can be typed from here."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short
