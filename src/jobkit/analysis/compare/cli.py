"""`python -m jobkit compare STUDY OTHER`: which sizes differ beyond chance; a gate for scripts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import Exit, Parser, UsageError, at_least, command

if TYPE_CHECKING:
    import pandas as pd

_EXAMPLES = """A difference is that of STUDY from OTHER, in per cent of the rate, with the 95 %
interval of Welch's t test. It is beyond chance where its p value, corrected for the number of sizes
tested (Holm), is under 0.05. What else differs (devices, commits, settings) is named first.

examples:
  python -m jobkit compare today last-month
  python -m jobkit compare today --reference reference/results.csv --tolerance 5    in a script

exit codes:
  0  no size of STUDY is slower beyond chance and tolerance
  2  wrong usage: no such study or file, or no size that both have measured
  3  no size could be judged: one repeat shows no chance
  4  a size of STUDY is slower than in OTHER, beyond chance and tolerance
"""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compare two studies; return the exit code."""
    text = "Compare the rates of two studies, or of a study and a results.csv kept as reference."
    parser = Parser(prog="jobkit compare", description=text, epilog=_EXAMPLES)
    parser.add_argument("study", metavar="STUDY", help="a study's folder or bare name")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="the study to compare it with")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="a results.csv, not OTHER")
    parser.add_argument(
        "--tolerance",
        type=at_least(float, 0),
        default=0.0,
        metavar="PERCENT",
        help="differences up to this many per cent do not count (default: 0)",
    )
    args = parser.parse_args(argv)
    if (args.other is None) == (args.reference is None):
        raise UsageError("give OTHER or --reference FILE, one of the two")
    if args.tolerance >= 100:
        raise UsageError(f"--tolerance {args.tolerance:g}: must be below 100 per cent")

    from jobkit.analysis.collect.results import OUTDATED, Results
    from jobkit.analysis.compare.compare import compare

    study = Results.load(args.study)
    outdated = [f"{study.name}: {OUTDATED}"] * study.is_outdated
    if args.reference:
        other = _reference(args.reference)
    else:
        of_other = Results.load(args.other)
        other = of_other.runs
        outdated += [f"{of_other.name}: {OUTDATED}"] * of_other.is_outdated
    found, remarks = compare(study.runs, other, args.tolerance / 100)
    if not found:
        raise UsageError(f"no size that both have measured ({'; '.join(remarks) or 'no rates'})")
    for line in (*outdated, *remarks, *(c.line() for c in found)):
        print(line)
    judged = [c for c in found if c.p_value is not None]
    slower = sum(c.slower for c in found)
    beyond = f" by more than {args.tolerance:g} %" if args.tolerance else ""
    print(f"{len(judged)} of {len(found)} sizes judged: {slower} slower{beyond} beyond chance")
    if not judged:
        return Exit.INCOMPLETE
    return Exit.THRESHOLD if slower else Exit.OK


def _reference(path: Path) -> "pd.DataFrame":
    """The rows of a results.csv that was kept."""
    from jobkit.analysis.tables.columns import RESULTS
    from jobkit.analysis.tables.frames import read_table

    table = read_table(path, RESULTS)
    needed = ("series", "world_size", "status", "throughput")
    if missing := [name for name in needed if table[name].isna().all()]:
        raise UsageError(f"{path}: no results.csv of jobkit: it lacks {', '.join(missing)}")
    return table
