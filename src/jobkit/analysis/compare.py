"""`python -m jobkit compare STUDY OTHER`: which sizes differ beyond chance; a gate for scripts.

The rates of a size's repeats are compared as logarithms of their medians. Their spread is that of
all repeats of both studies, as in scaling.csv; intervals are wider by the number of tests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.errors import Exit, Parser, UsageError, at_least, command

if TYPE_CHECKING:
    import pandas as pd

_EXAMPLES = """A difference is that of STUDY from OTHER, in per cent of the rate. Its interval says
what is chance; all of them hold together with 95 % (Bonferroni). One line is of all sizes together.
What else differs (devices, commits, settings, days) is named first: two studies of one day each
also differ by what changes from day to day.

examples:
  python -m jobkit compare today last-month
  python -m jobkit compare today reference/results.csv --tolerance 5    in a script

exit codes:
  0  no size of STUDY is slower beyond chance and tolerance
  2  wrong usage: no such study or file, or no size that both have measured
  3  no size could be judged: one repeat of each shows no chance, or commands differ
  4  a size of STUDY, or all of them together, is slower beyond chance and tolerance
"""
# What may differ on purpose between two studies, and must then be named beside the comparison.
_NAMED = ["device", "device_type", "git_commit", "torch_version", "model", "dataset", "precision"]
_NAMED += ["fp32", "global_batch_size", "batch_size_per_rank", "train_samples", "threads_used"]
_START = {"launcher", "auto"}  # settings of a command that leave the work of its steps alone
_DAY_S = 24 * 3600
_WHOLE = "on the whole"
Both = Sequence[dict[str, dict[str, Any]]]  # settings of each series, of each of two studies


@dataclass(frozen=True)
class Comparison:
    """One size in two studies, or all of them."""

    name: str
    difference: float  # of the logarithms of the rates, the study's less the other's
    half_width: float | None  # of its interval; None: not judged
    tolerance: float
    lacks: str = "that takes 2 repeats of a size"  # why it is not judged

    @property
    def slower(self) -> bool:
        """Whether the study is slower than the other beyond chance and tolerance."""
        half, most = self.half_width, math.log1p(-self.tolerance)
        return half is not None and self.difference + half < most

    def line(self) -> str:
        """The comparison in one line."""
        text, half = f"{self.name}: {math.expm1(self.difference):+.1%}", self.half_width
        if half is None:
            return f"{text}: not judged: {self.lacks}"
        low, high = (math.expm1(self.difference + x) for x in (-half, half))
        what = f"within {100 * self.tolerance:g} %" if self.tolerance else "chance"
        what = what if max(-low, high) < self.tolerance else f"may be {what}"
        if self.slower or replace(self, difference=-self.difference).slower:
            what = f"{'slower' if self.slower else 'faster'} beyond chance"
        return f"{text} [{low:+.1%}, {high:+.1%} at 95%]: {what}"


def settings_of(folder: Path, runs: "pd.DataFrame") -> dict[str, dict[str, Any]]:
    """What the runs of each series were to do, where their folders still say it."""
    from jobkit.spec.study import read_run_spec, run_folders

    series = dict(zip(runs["run_id"], runs["series"], strict=True))
    folders = {f: series[f.name] for f in run_folders(folder) if f.name in series}
    return {name: spec.comparable() for f, name in folders.items() if (spec := read_run_spec(f))}


def compare(
    runs: "pd.DataFrame", other: "pd.DataFrame", tolerance: float = 0.0, both: Both = ({}, {})
) -> tuple[list[Comparison], list[str]]:
    """Compare the sizes that both have, and all together; what differs beside, in words.

    runs, other: with the columns of results.csv. tolerance: a share of the rate below which no
    difference counts. both: settings of each, if known.
    """
    from jobkit.analysis.collect.why import busy_clause
    from jobkit.analysis.findings.causes import DIFFER
    from jobkit.analysis.scaling.scaling import sample_of
    from jobkit.analysis.scaling.sizes import sizes, where
    from jobkit.analysis.scaling.spread import CONFIDENCE, pool, quantile
    from jobkit.analysis.tables.frames import records
    from jobkit.analysis.tables.series import IN_STEPS
    from jobkit.analysis.tables.text import some

    ours, theirs = (
        {
            f"{s.series} at {where(s, 'ranks')} "
            f"({s.scaling or 'unstated'} scaling, {s.throughput_unit})": s
            for s in sizes(table)
            if sample_of(s)[0]
        }
        for table in (runs, other)
    )
    spread = pool([sample_of(s) for s in (*ours.values(), *theirs.values())])
    rows: list[tuple[str, float, float]] = []  # name, difference, its standard error
    compared, unlike = list[Comparison](), dict[str, tuple[Any, Any]]()
    for key in (key for key in ours if key in theirs):
        pair, name = (ours[key], theirs[key]), key.rpartition(" (")[0]
        gap = math.log((pair[0].throughput or 1) / (pair[1].throughput or 1))
        own, others = (known.get(pair[0].series, {}) for known in both)
        shared = own.keys() | others.keys() if own and others else set[str]()
        differ = {n: (own.get(n), others.get(n)) for n in shared if own.get(n) != others.get(n)}
        unlike |= differ
        if (unit := pair[0].throughput_unit).endswith((IN_STEPS, "/h")) and differ.keys() - _START:
            why = f"the commands differ, and {unit} do not say the work of each: state --unit and "
            compared.append(Comparison(name, gap, None, tolerance, f"{why}--work-per-step"))
            continue
        error = math.hypot(*(spread.error(sample_of(s)) for s in pair)) if spread else 0.0
        rows.append((name, gap, error))
    if spread and len(rows) > 1:
        weights = [1 / error**2 for _, _, error in rows]
        mean = sum(w * gap for w, (_, gap, _) in zip(weights, rows, strict=True)) / sum(weights)
        rows.append((_WHOLE, mean, 1 / math.sqrt(sum(weights))))
    # Wider by the number of tests (Bonferroni), so that all intervals hold together.
    factor = quantile(spread.freedom, 1 - (1 - CONFIDENCE) / len(rows)) if spread and rows else None
    compared += [Comparison(n, gap, factor and factor * e, tolerance) for n, gap, e in rows]
    remarks, ok = list[str](), [table[table["status"] == "ok"] for table in (runs, other)]
    for name in dict.fromkeys([*_NAMED, *DIFFER, *sorted(unlike)]):
        sides = [sorted({str(v) for v in t[name].dropna()}) if name in t else [] for t in ok]
        if not all(sides) and name in unlike:  # else recorded as the runs decided it
            sides = [[" ".join(v) if isinstance(v, tuple) else str(v)] for v in unlike[name]]
        if sides[0] != sides[1]:
            remarks.append(f"{name} differs: {' against '.join(some(s, 5) or '?' for s in sides)}")
    starts = [table["start_time_s"].dropna() for table in ok]
    on_one_day = all(len(s) and s.max() - s.min() < _DAY_S for s in starts)
    if on_one_day and max(s.min() for s in starts) - min(s.max() for s in starts) >= _DAY_S / 2:
        text = "each study was measured on one day, and days differ: repeat both on several, or"
        remarks.append(f"{text} give --tolerance what days differ by")
    each = (("first", runs, ok[0], ours, theirs), ("second", other, ok[1], theirs, ours))
    for study, table, good, own, missing in each:
        if bad := len(table) - len(good):
            remarks.append(f"{bad} of {len(table)} runs of the {study} are not ok")
        if busy := busy_clause(records(good)):
            remarks.append(f"in the {study} {busy}")
        if names := [name for name in own if name not in missing]:
            remarks.append(f"only in the {study}: {some(names, 5)}")
    return compared, remarks


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compare two studies; return the exit code."""
    text = "Compare the rates of two studies, or of a study and a results.csv kept as reference."
    parser = Parser(prog="jobkit compare", description=text, epilog=_EXAMPLES)
    parser.add_argument("study", metavar="STUDY", help="a study's folder or bare name")
    parser.add_argument("other", metavar="OTHER", help="another study, or the results.csv of one")
    number, text = at_least(float, 0), "differences up to so many per cent do not count (default 0)"
    parser.add_argument("--tolerance", type=number, default=0.0, metavar="PERCENT", help=text)
    args = parser.parse_args(argv)
    if args.tolerance >= 100:
        raise UsageError(f"--tolerance {args.tolerance:g}: must be below 100 per cent")

    from jobkit.analysis.collect.results import OUTDATED, Results
    from jobkit.analysis.tables.columns import RESULTS
    from jobkit.analysis.tables.frames import read_table

    kept = Path(args.other) if args.other.endswith(".csv") else None
    studies = [Results.load(name) for name in ([args.study] if kept else [args.study, args.other])]
    outdated = [f"{study.name}: {OUTDATED}" for study in studies if study.is_outdated]
    place = kept.parent if kept else studies[1].folder
    other = read_table(kept, RESULTS) if kept else studies[1].runs
    both = settings_of(studies[0].folder, studies[0].runs), settings_of(place, other)
    compared, remarks = compare(studies[0].runs, other, args.tolerance / 100, both)
    if not compared:
        raise UsageError(f"no size that both have measured: {'; '.join(remarks) or 'no rates'}")
    for line in (*outdated, *remarks, *(c.line() for c in compared)):
        print(line)
    sizes = [c for c in compared if c.name != _WHOLE]
    judged, slower = sum(c.half_width is not None for c in sizes), sum(c.slower for c in sizes)
    beyond = f" by more than {args.tolerance:g} %" if args.tolerance else ""
    print(f"{judged} of {len(sizes)} sizes judged: {slower} slower{beyond} beyond chance")
    if not judged:
        return Exit.INCOMPLETE
    return Exit.THRESHOLD if any(c.slower for c in compared) else Exit.OK
