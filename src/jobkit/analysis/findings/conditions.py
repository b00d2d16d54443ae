"""What limits the trust in a study's numbers: caveats, each found by a test of its own.

They stand in the sentence that says what to request, in the report and under the proposal's table.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median, mode
from typing import Any

import numpy as np
import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.collect.steps import WITH_START
from jobkit.analysis.collect.why import busy_clause
from jobkit.analysis.findings.causes import base_of, differences, rows_of, values_of
from jobkit.analysis.scaling.scaling import comparable_at
from jobkit.analysis.scaling.sizes import Size, median_of, numbers_of, where
from jobkit.analysis.scaling.spread import tail
from jobkit.analysis.tables.text import counted, say_accuracy, some
from jobkit.outcome.state import UNDER_WAY

BUSY = 0.5  # share of the time below which GPUs that compute no more are limited by the host
_DISTURBED = 0.2  # share of the cores that other programs used in most runs
_WAITING = 0.2  # share of the time that every size waits for data
_ABOVE_IDEAL, _ABSURD = 1.05, 2.0  # of an efficiency; no cache explains so much
_UNSTEADY, _COLD = 0.04, 0.1  # change of the rate within a run; what a slow first epoch adds
_DRIFT, _CHANCE = 0.02, 0.01  # change of the rate over a study; p value of a slope
_SLOW_NODE = 0.04  # how much slower runs on some nodes are
_BY_CHANCE, _DRAWS, _MAX_DRAWN = 0.1, 200, 1000  # that slow runs have nodes of their own
_FELL, _POINTS, _LOSS = 0.01, 0.005, 0.01  # of accuracy: to tune, worth a word; the same of a loss
_LARGE = 20  # times what is worth a word: beyond doubt, though a repeat is still sound
_SHOWN = 4
_ENDED = ("cancelled", "preempted", *UNDER_WAY)  # nothing failed
_INFERRED = "inferred"  # of the work of a step: nobody has stated it


@dataclass(frozen=True)
class Caveat:
    """A clause that can follow a semicolon, or stand before the sentence."""

    text: str
    doubts: bool = False  # whether intervals do not hold, so that no sentence is sure
    first: bool = False  # whether it comes before all that is said
    grave: bool = False  # whether it is said with the request before any other line


def caveats(results: Results, unit: str, request: Size | None = None) -> list[Caveat]:
    """The caveats of a study, the gravest first; request: the size that is recommended."""
    own = [s for s in results.sizes if request is None or s.series == request.series]
    compared = [s for s in own if s.efficiency]
    base = base_of(results, request)
    rated = [*own, base] if base and base not in own else own
    slow = list(_slow_nodes(results, request))
    return [
        *_before_all(results, compared, unit),
        *([Caveat(failed, grave=True)] if (failed := failure(results, own, unit, request)) else ()),
        *_unrated(results),
        *_accuracy(results, compared, request, unit),
        *slow,
        *_different(results, compared, request, unit),
        *_unsteady(results, rated),
        *_drift(results, compared, rated),
        *_nodes(results, compared, unit),
        *_few(results, compared, request, unit),
        *(_outlying(own) if not slow else ()),
        *_sources(results.runs),
    ]


def disturbed(results: Results) -> bool:
    """Whether most runs were on CPUs beside other programs: no rate or cause is certain then."""
    rows = [results.rows[run] for size in results.sizes for run in size.ok_runs]
    rows = [row for row in rows if row.get("device_type") == "cpu"]
    return (median_of(rows, "other_load_mean") or 0.0) > _DISTURBED


def _before_all(results: Results, compared: Sequence[Size], unit: str) -> Iterator[Caveat]:
    """A machine that others used, copies, data that all sizes wait for, and GPUs that are idle."""
    if busy := busy_clause(results.rows[run] for size in results.sizes for run in size.ok_runs):
        yield Caveat(busy, doubts=True, first=True)
    ok = [row for row in results.rows.values() if row["status"] == "ok"]
    if copied := [row for row in ok if row.get("ranks_together") == "none"]:
        who = "the {world_size} ranks of {series} are copies".format_map(copied[-1])
        yield Caveat(f"{who} of one program: give it DDP, or state --together", first=True)
    if short := sum(row.get("ranks_together") == "unknown" for row in ok):
        text = f"it is unknown whether the ranks of {counted(short, 'short run')} worked together"
        yield Caveat(text, doubts=True, grave=True)
    waits, known = [], []  # of the runs of a size, as far as it was measured
    for size in compared:
        rows = rows_of(results, size)
        share, whole = median_of(rows, "data_wait_share"), median_of(rows, "breakdown_iteration_s")
        if whole and (share is None or rows[0].get("device_type") == "cuda"):  # which hides waiting
            share = (median_of(rows, "breakdown_data_wait_s") or 0.0) / whole
        waits.append(share or 0.0)
        # A GPU that waits for data is not idle by its host; one that waits for others is busy.
        if size.gpu_busy is not None and waits[-1] < (1 - size.gpu_busy) / 2:
            known.append(size)
    worst = min(known, key=lambda s: s.gpu_busy or 0, default=None)
    if waits and min(waits) >= _WAITING and not disturbed(results):
        ends = dict.fromkeys(f"{end:.0%}" for end in (min(waits), max(waits)))
        text = f"every size waits for data {' to '.join(ends)} of the time: mend that first"
        yield Caveat(text, first=True)
    elif worst and (worst.gpu_busy or 0) < BUSY:
        who = where(worst, unit)
        text = f"{who} {'is' if who == '1 GPU' else 'are'} busy {worst.gpu_busy:.0%} of the time"
        text += ", so efficiency means nothing"
        yield Caveat(f"the host is the limit: {text}", doubts=True, first=True)


def failure(results: Results, sizes: Sequence[Size], unit: str, request: Size | None = None) -> str:
    """How many runs of the request, else the worst size, are not ok, and why; empty if all are."""
    bad = [s for s in sizes if s.not_ok]
    if not bad:
        return ""
    most = max(bad, key=lambda s: (len(s.not_ok) / s.runs_planned, s.world_size or 0))
    worst = request if request in bad else most
    named = f" with {worst.series}" if len({s.series for s in results.sizes}) > 1 else ""
    ends = "have not ended" if {*worst.not_ok} <= {*UNDER_WAY} else "are not ok"
    count = f"{len(worst.not_ok)} of {worst.runs_planned} runs {ends}"
    return f"on {where(worst, unit)}{named} {count} ({_reason_of(results, worst)})"


def _unrated(results: Results) -> Iterator[Caveat]:
    """Runs that are ok without a rate, though others of their series have one; and restarts."""
    rated = {s.series for s in results.sizes if s.rates}
    rows = [results.rows[run] for s in results.sizes if s.series in rated for run in s.ok_runs]
    silent = [row for row in rows if row.get("throughput") is None]
    # A rate that was refused is told of there.
    left = [r.get("step_time_s") for r in silent if " rate" not in str(r.get("problems"))]
    if idle := left.count(None):
        text = f"{idle} of {len(rows)} runs show no optimizer step, though others do: do they "
        yield Caveat(f"{text}resume what another run wrote? write into {{run_dir}}", grave=True)
    if other := len(left) - idle:
        text = f"{counted(other, 'rate')} left out: in another unit, or of the warm-up alone"
        yield Caveat(text, grave=True)
    if again := sum((row.get("attempts") or 1) > 1 for row in rows):
        yield Caveat(f"{again} of {len(rows)} runs had to be started again")


def _reason_of(results: Results, size: Size) -> str:
    """Why the runs of a size are not ok: the reason of most, in a few words."""
    reasons = sorted(  # of as many the one that says why
        (status in _ENDED, status if status in UNDER_WAY else row.get("reason") or status)
        for row in results.rows.values()
        if (status := row["status"]) != "ok"
        and all(row.get(name) == getattr(size, name) for name in ("series", "world_size", "nodes"))
    )
    text = mode(reasons)[1] if reasons else size.not_ok[0]
    text = re.sub(r"^(rank \d+: )?([\w.]*(Error|Exception): )?", "", text).split(". ")[0].strip()
    return text if len(text) <= 50 else f"{text[:47].rsplit(' ', 1)[0]} ..."


@dataclass(frozen=True)
class Change:
    """What a loss or an accuracy does from the smallest size of a series to another one."""

    before: float
    after: float  # infinite: no run has a number, as where the training diverged
    size: Size  # where it changes most, else the largest one
    matters: bool  # worth a word, and large, or no repeat is within those of the other size

    @property
    def fell(self) -> float:
        return self.before - self.after

    def words(self, form: Callable[[float], str]) -> str:
        """What it does, as it follows its name."""
        verb = "falls" if self.fell > 0 else "rises"
        known = f"{verb} from {form(self.before)} to {form(self.after)}"
        return "is NaN or missing" if math.isinf(self.after) else known


def changes(results: Results, sizes: Sequence[Size], column: str) -> list[Change]:
    """The change of a column in each series, over the sizes that trained for as many epochs."""
    found = []
    known = [s for s in sizes if not s.note and s.ok_runs and s.world_size]
    for series in dict.fromkeys(s.series for s in known):
        first, *later = (s for s in known if s.series == series)
        own = []
        for size in (s for s in later if s.world_size != first.world_size):
            ends = [rows_of(results, each) for each in (first, size)]
            small, large = (numbers_of(rows, column) for rows in ends)
            if small and len({tuple(values_of(rows, "epochs_done")) for rows in ends}) == 1:
                share, before = column == "val_accuracy", median(small)
                after = median(large) if large else -math.inf if share else math.inf
                change, least = abs(after - before), _POINTS if share else _LOSS * abs(before)
                apart = not large or differ(small, large) or change >= _LARGE * least
                own.append(Change(before, after, size, apart and 0 < change >= least))
        # max keeps the first of equals.
        found += [max(reversed(own), key=lambda c: abs(c.fell) if c.matters else 0)] if own else []
    return found


def alike(results: Results, column: str) -> bool:
    """Whether a loss or an accuracy of all runs that are ok is known, and of all series the same.

    Of another number of epochs it is another quantity.
    """
    ok = results.runs[results.runs["status"] == "ok"]
    middles = ok.groupby("series")[column].median()
    least = _POINTS if column == "val_accuracy" else _LOSS * abs(middles.max())
    whole = ok[column].notna().all() and ok["epochs_done"].nunique() < 2
    return bool(whole and np.ptp(middles) <= least)


def differ(values: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the ranges of two sets of repeats do not overlap."""
    return max(values) < min(others) or max(others) < min(values)


def _accuracy(
    results: Results, compared: Sequence[Size], request: Size | None, unit: str
) -> Iterator[Caveat]:
    """Up to the request, an accuracy that falls by points, or a loss that rises as much or ends."""
    sizes = [s for s in compared if not request or (s.devices or 0) <= (request.devices or 0)]
    accuracies, losses = (changes(results, sizes, name) for name in ("val_accuracy", "val_loss"))
    found = [("accuracy", c, say_accuracy) for c in accuracies if c.fell >= _FELL]
    rise, form = _LARGE * _LOSS, "{:.3g}".format
    found += [("loss", c, form) for c in losses if -c.fell >= rise * abs(c.before)]
    for name, change, shown in [one for one in found if one[1].matters][:1]:
        text = f"{name} {change.words(shown)} on {change.size.devices} {unit}: tune first"
        yield Caveat(text, grave=True)
    known = {s: [r.get("val_loss") for r in rows_of(results, s)] for s in compared}
    for size in (s for s, losses in known.items() if None in losses and any(losses)):
        count = f"{known[size].count(None)} of {len(known[size])} runs"
        yield Caveat(f"loss is NaN or missing in {count} on {where(size, unit)}", grave=True)
    beside = [
        s
        for s in results.sizes
        if request and not s.note and s.world_size == request.world_size
        if comparable_at(s) == comparable_at(request) and s.val_accuracy is not None
    ]
    if request in beside:
        best = max(beside, key=lambda s: s.val_accuracy or 0)
        pair = [rows_of(results, s) for s in (request, best)]
        mine, others = (numbers_of(rows, "val_accuracy") for rows in pair)
        same = len(values_of([*pair[0], *pair[1]], "epochs_done")) < 2 and differ(mine, others)
        if same and median(others) - median(mine) >= _FELL:
            low, high = (say_accuracy(median(values)) for values in (mine, others))
            text = f"accuracy is {low}, but {high} with {best.series}: tune first"
            yield Caveat(text, grave=True)
    rows = [row for size in compared for row in rows_of(results, size)]
    epochs = {row["epochs_done"] for row in rows if row.get("epochs_done") is not None}
    if len(epochs) > 1 and any(row.get("val_loss") for row in rows):
        text = f"runs trained for {min(epochs)} to {max(epochs)} epochs"
        yield Caveat(f"{text}: losses are not compared")


def _rated(results: Results, column: str, sizes: Sequence[Size] | None = None) -> pd.DataFrame:
    """The runs with a rate and a value in a column: their size's place and ranks, value and log."""
    rows = [
        (size.place, size.world_size, value, math.log(rate))
        for size in (results.sizes if sizes is None else sizes)
        for run, rate in zip(size.rated_runs, size.rates, strict=True)
        if rate > 0 and (value := results.rows[run].get(column)) is not None
    ]
    return pd.DataFrame(rows, columns=["place", "ranks", "value", "log"])


def _slow_nodes(results: Results, request: Size | None) -> Iterator[Caveat]:
    """Nodes that are in slow runs only, and what the efficiency is without them."""
    text, sound = _slow_and_sound(results)
    base = base_of(results, request)
    if text and request and base and {request.place, base.place} <= sound.keys():
        ratio = math.exp(sound[request.place] - sound[base.place]) * (base.devices or 0)
        text += f": without them parallel efficiency is {ratio / (request.devices or 1):.0%}"
    if text:
        yield Caveat(text, doubts=True)


@lru_cache(maxsize=1)
def _slow_and_sound(results: Results) -> tuple[str, dict[Any, float]]:
    """Which nodes are in slow runs only: the rates of a size split in two where they take part.

    And the logarithm of the rate of each place without them.
    """
    runs = _rated(results, "node_list")
    logs = runs.groupby("place")["log"]
    runs["rest"] = runs["log"] - logs.transform("max")
    nodes = [set(filter(None, text.split(","))) for text in runs["value"]]
    groups = [own for own in logs.indices.values() if len(own) > 1]
    order = runs["rest"][logs.transform("size") > 1].sort_values()
    if len(order) < 3 or order.diff().max() < _SLOW_NODE / 2:
        return "", {}
    first = int(order.diff().argmax())  # of the fast runs
    slow, fast = order[:first], order[first:]

    def exclusive(slow: Collection[int]) -> set[str]:
        """The nodes of slow runs that no other has; none unless each slow run has one."""
        others = set[str]().union(*(nodes[i] for i in order.index if i not in slow))
        only = set[str]().union(*(nodes[i] for i in slow)) - others
        return only if all(nodes[i] & only for i in slow) else set()

    members, drop = {*slow.index}, -math.expm1(slow.median() - fast.median())
    if len(slow) < 2 or drop < _SLOW_NODE or not (only := exclusive(members)):
        return "", {}
    # How often as many slow runs of each size, drawn by lot, would have nodes of their own.
    lot, hits = np.random.default_rng(0), 0
    for _ in range(_DRAWS if len(order) <= _MAX_DRAWN else 0):
        drawn = (lot.choice(own, len({*own} & members), replace=False) for own in groups)
        hits += bool(exclusive({int(i) for part in drawn for i in part}))
    if hits > _BY_CHANCE * _DRAWS:
        return "", {}
    sound = runs[[not own & only for own in nodes]].groupby("place")["log"].median()
    return f"runs on {some(sorted(only), _SHOWN)} are {drop:.0%} slower", sound.to_dict()


def _different(
    results: Results, compared: Sequence[Size], request: Size | None, unit: str
) -> Iterator[Caveat]:
    """Devices, commits, drivers or clocks that differ between a size and its base, or within it."""
    for size in sorted(compared, key=lambda s: (s != request, -(s.world_size or 0))):
        base = base_of(results, size) or size
        if found := [t for t in differences(results, size, base) if t.endswith(")")]:
            yield Caveat(f"{where(size, unit)} had {' and '.join(found[:2])}", doubts=True)
            return
    for name in ("device", "git_commit", "driver_version", "gpu_max_clock"):
        if any(len(values_of(rows_of(results, size), name)) > 1 for size in compared):
            yield Caveat(f"runs of one size differ in {name.replace('_', ' ')}", doubts=True)


def _unsteady(results: Results, sizes: Sequence[Size]) -> Iterator[Caveat]:
    """Rates that rise or fall within the runs: a warm-up left in, or clocks that fall."""
    squares, free, (trends, first) = 0.0, 0, _trends(results)
    extra = [median([first.get(run, 0.0) for run in s.ok_runs]) for s in sizes if s.ok_runs]
    if (share := max(extra, default=0.0)) > _COLD:
        yield Caveat(f"a slow first epoch adds {share:.0%} to training: train longer", doubts=True)
    slopes = defaultdict[Any, list[tuple[float, float]]](list)  # change over a run, weight
    for size in sizes:
        for change, weight, rest, count in (trends[run] for run in size.ok_runs if run in trends):
            squares, free = squares + rest, free + count - 2
            slopes[size.place].append((change, weight))
    changed = []
    for own in slopes.values():
        middle, weight = median(change for change, _ in own), sum(weight for _, weight in own)
        error = math.sqrt(squares / free / weight)
        sure = not error or tail(abs(middle) / error, free) <= _CHANCE
        if sure and abs(middle) > _UNSTEADY and all(c * middle > 0 for c, _ in own):
            changed.append(math.expm1(middle))
    if changed:
        largest = max(changed, key=abs)
        verb, why = ("rise", "a warm-up") if largest > 0 else ("fall", "falling clocks")
        text = f"rates still {verb} by {abs(largest):.0%} within runs, as in {why}: train longer"
        yield Caveat(text, doubts=True)


@lru_cache(maxsize=1)
def _trends(
    results: Results,
) -> tuple[dict[str, tuple[float, float, float, int]], dict[str, float]]:
    """By run_id, of a line through log(rate): its change, the squares of x and residuals, count.

    The rates are of epochs after the first, else of windows: three or more, of the newest attempt,
    as another one may have been on another node. And what a slow first epoch adds to the time of
    them all, as a share. Each series asks for the same.
    """

    def newest(table: pd.DataFrame) -> pd.DataFrame:
        attempts = table["attempt"].fillna(0)  # [METRIC] lines of a log say none
        return table[attempts == attempts.groupby(table["run_id"]).transform("max")]

    epochs, steps = newest(results.epochs), newest(results.steps)
    timed = epochs[epochs["images_per_s"].gt(0).fillna(False)].sort_values("epoch")
    by_run = timed["images_per_s"].astype(float).groupby(timed["run_id"], sort=False)
    curves = {str(run): rates.tolist()[1:] for run, rates in by_run if len(rates) > 3}
    first = {}
    for run, own in timed.dropna(subset=["timed_images"]).groupby("run_id", sort=False):
        fast, images = own["images_per_s"].tolist(), own["timed_images"].tolist()
        if len(fast) > 2 and sum(images):
            first[str(run)] = images[0] * (median(fast[1:]) / fast[0] - 1) / sum(images)
    sound = steps["throughput"].gt(0).fillna(False) & ~steps["warmup"].fillna(False).astype(bool)
    windows = steps["throughput"][sound].astype(float).groupby(steps["run_id"][sound], sort=False)
    for run, rates in windows:
        if len(rates) >= 3:  # thirds of many windows: they are of different lengths
            parts = np.array_split(rates.to_numpy(), 3 if len(rates) > 5 else len(rates))
            curves.setdefault(str(run), [float(np.median(part)) for part in parts])
    trends = {}
    for run_id, curve in curves.items():
        at, logs = np.linspace(-0.5, 0.5, len(curve)), np.log(curve)
        weight, change = float(at @ at), float(at @ logs / (at @ at))
        rest = float(((logs - logs.mean() - change * at) ** 2).sum())
        trends[run_id] = change, weight, rest, len(at)
    return trends, first


def _drift(results: Results, compared: Sequence[Size], sizes: Sequence[Size]) -> Iterator[Caveat]:
    """Rates that change with the time of the start, and sizes that ran one after the other."""
    runs = _rated(results, "start_time_s", sizes)
    own = runs.groupby("place")
    times, logs = (runs[name] - own[name].transform("mean") for name in ("value", "log"))
    free, spread = len(runs) - own.ngroups - 1, float((times**2).sum())
    if free >= 3 and spread:
        slope = float((times * logs).sum()) / spread
        error = math.sqrt(float(((logs - slope * times) ** 2).sum()) / free / spread)
        change = slope * float(np.ptp(runs["value"]))
        if abs(change) >= _DRIFT and (not error or tail(abs(slope) / error, free) <= _CHANCE):
            yield Caveat(f"rates drift by {math.expm1(change):+.0%} over the study", doubts=True)
    of_ranks = _rated(results, "start_time_s", compared).groupby("ranks")["value"]
    spans = of_ranks.agg(["min", "max", "size"])
    rising = (spans["max"].shift() < spans["min"])[1:].all()
    falling = (spans["min"].shift() > spans["max"])[1:].all()
    if len(spans) > 2 and spans["size"].max() > 1 and (rising or falling):
        text = "sizes ran in their order, so a drift looks like scaling: shuffle them"
        yield Caveat(text, doubts=True)


def _nodes(results: Results, compared: Sequence[Size], unit: str) -> Iterator[Caveat]:
    """Runs that used a node at the same time; sizes whose repeats all had the same of the nodes."""
    if shared := _shared(results):
        yield Caveat(f"{shared} with others: use --exclusive", doubts=True)
    listed = [(s, [results.rows[run].get("node_list") for run in s.rated_runs]) for s in compared]
    used = [(s, [frozenset(text.split(",")) for text in lists if text]) for s, lists in listed]
    every = frozenset[str]().union(*(own for _, lists in used for own in lists))
    repeated = [(size, {*lists}) for size, lists in used if len(lists) > 1]
    # Repeats on all nodes of the study had no others to run on.
    narrow = [size for size, lists in repeated if len(lists) == 1 and every not in lists]
    if narrow:
        varied = any(len(lists) > 1 for _, lists in repeated)
        of = f" on {some([where(s, unit) for s in narrow], _SHOWN)}" if varied else ""
        yield Caveat(f"repeats{of} shared their nodes: intervals are too narrow", doubts=True)


@lru_cache(maxsize=1)
def _shared(results: Results) -> str:
    """How many runs used a node while another one did; empty where none."""
    needed = ["job_id", "node_list", "start_time_s", "end_time_s"]
    runs = results.runs[["run_id", "status", *needed]].dropna(subset=needed)
    each = runs.assign(node=runs["node_list"].str.split(",")).explode("node")
    each = each.drop_duplicates(["run_id", "node"]).sort_values("start_time_s")
    start, end, node = each["start_time_s"], each["end_time_s"], each["node"]
    before = end.groupby(node).transform(lambda ends: ends.cummax().shift())
    after = start.groupby(node).shift(-1)
    shared = each[start.lt(before).fillna(False) | end.gt(after).fillna(False)]
    count = shared["run_id"][shared["status"] == "ok"].nunique()
    which = some(sorted(shared["node"].unique()), _SHOWN)
    return f"{counted(count, 'run')} shared nodes ({which})" if count else ""


def _few(
    results: Results, compared: Sequence[Size], request: Size | None, unit: str
) -> Iterator[Caveat]:
    """Sizes of one run, and an efficiency above ideal."""
    base = base_of(results, compared[-1]) if compared else None
    if base and all(len(s.rates) < 2 for s in compared):
        of = f" of {compared[-1].series}" * any(len(s.rates) > 1 for s in results.sizes)
        yield Caveat(f"one run a size{of}: differences may be chance", grave=True)
    elif base and len(base.rates) == 1:
        yield Caveat(f"the base, {where(base, unit)}, is one run: repeat it", grave=True)
    elif single := [s for s in compared if len(s.rates) == 1]:
        names = some([where(s, unit) for s in single], _SHOWN)
        yield Caveat(f"only one run on {names}: repeat it", grave=request in single)
    several = [s for s in compared if (s.devices or 0) > 1]
    top = max(several, key=lambda s: s.efficiency or 0, default=None)
    if top and base and (top.efficiency or 0) > _ABOVE_IDEAL:
        absurd = (top.efficiency or 0) > _ABSURD
        do = "check units and scaling" if absurd else f"repeat the base, {where(base, unit)}"
        text = f"{top.efficiency:.0%} on {where(top, unit)} is above ideal: {do}"
        yield Caveat(text, doubts=absurd)


def _outlying(sizes: Sequence[Size]) -> Iterator[Caveat]:
    """Runs far from the median of their size: one far above may be the only sound one."""
    found = [
        f"{run} {rate / median(size.rates) - 1:+.0%}"
        for size in sizes
        for run, rate in zip(size.rated_runs, size.rates, strict=True)
        if run in (size.outliers or "").split(", ")
    ]
    if found:
        yield Caveat(f"{counted(len(found), 'outlier')} among the repeats ({some(found, _SHOWN)})")


def _sources(runs: pd.DataFrame) -> Iterator[Caveat]:
    """Rates of samples that nobody has stated, or with the start-up in them."""
    rated = runs[(runs["status"] == "ok") & runs["throughput"].notna()]
    known = rated["work_source"].dropna()
    if count := int((known == _INFERRED).sum()):
        of = "" if count == len(known) else f" in {count} of {len(known)} runs"
        yield Caveat(f"samples are inferred from the batches{of}: state --work-per-step")
    if any(WITH_START in source for source in rated["throughput_source"].dropna()):
        yield Caveat(f"rates are of whole runs, {WITH_START}", doubts=True)
