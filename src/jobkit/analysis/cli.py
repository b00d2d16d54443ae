"""The commands collect_results.py and plot_results.py.

pandas, matplotlib and rich are imported only where they are needed: --help stays fast.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jobkit.errors import Exit, UsageError

_COLLECT = """examples:
  python collect_results.py                     the newest study
  python collect_results.py logs/demo           or just: demo
  python collect_results.py demo --json | jq .not_ok

exit codes:
  0  every planned run is ok
  2  wrong usage: no such study, a folder that cannot be written; nothing was written
  3  collected, but a run is not ok
"""
_PLOT = """examples:
  python plot_results.py                        the newest study
  python plot_results.py logs/demo              or just: demo

exit codes:
  0  the figures were made
  2  wrong usage: no such study, a folder that cannot be written
  3  no run has finished an epoch: no figure was made
"""


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
    text = "Collect a study's plan and logs into results.csv and epochs.csv, and sum them up."
    parser = _parser("collect_results.py", text, _COLLECT)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON instead")
    args = parser.parse_args(argv)

    from jobkit.analysis.collect import collect
    from jobkit.analysis.summary import as_json, print_summary

    results = collect(args.study)
    if args.json:
        print(as_json(results))
        for line in results.warnings():
            print(f"warning: {line}", file=sys.stderr)
    else:
        print_summary(results)
        paths = results.paths
        for path, frame, what in (
            (paths.results, results.runs, "run"),
            (paths.epochs, results.epochs, "epoch"),
        ):
            print(f"wrote {_shown(path)} ({len(frame)} {what}{'' if len(frame) == 1 else 's'})")
        print(f"next: python plot_results.py {_shown(paths.folder)}")
    return Exit.OK if results.ok else Exit.INCOMPLETE


def _plot(argv: Sequence[str] | None) -> int:
    text = "Draw a study: time per epoch, loss and accuracy, peak memory, as PNG and SVG."
    args = _parser("plot_results.py", text, _PLOT).parse_args(argv)

    from jobkit.analysis.collect import collect

    results = collect(args.study, write=False)
    if results.epochs.empty:
        states = ", ".join(f"{n} {s}" for s, n in results.runs["status"].value_counts().items())
        shown = _shown(results.folder)
        print(f"{shown}: no run has finished an epoch ({states}): no figure", file=sys.stderr)
        return Exit.INCOMPLETE

    from jobkit.analysis.figures import draw

    drawn = draw(results)
    for path in drawn.paths:
        print(f"wrote {_shown(path)}")
    for name in drawn.skipped:
        print(f"no {name}: no run that is ok says it", file=sys.stderr)
    return Exit.OK


def _shown(path: Path) -> str:
    """A path as short as it can be typed from here."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short
