"""What limits the trust in a study's numbers: caveats, each found by a test of its own.

They stand in the sentence that says what to request, in the report and under the proposal's table.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from jobkit.analysis.collect.lines import METRIC_LINES
from jobkit.analysis.collect.results import Results
from jobkit.analysis.collect.rows import OF_EPOCHS, WALL_TIME
from jobkit.analysis.collect.why import busy_clause
from jobkit.analysis.findings.causes import base_of, differences, median_of, rows_of, values_of
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.scaling.spread import tail
from jobkit.analysis.tables.frames import Row, records
from jobkit.analysis.tables.text import counted, counted_ranks, say_accuracy
from jobkit.outcome.state import UNDER_WAY

BUSY = 0.5  # share of the time below which GPUs that compute no more are limited by the host
_WAITING = 0.2  # share of the time that every size waits for data
_ABOVE_IDEAL, _APART = 1.05, 0.2  # of an efficiency; of the repeats of a size
_UNSTEADY, _SURE = 0.04, 3.0  # change of the rate within a run; in standard errors
_DRIFT, _CHANCE = 0.02, 0.01  # change of the rate over a study; p value of the slope
_SLOW_NODE = 0.04  # how much slower runs on some nodes are
_BY_CHANCE, _DRAWS, _MAX_DRAWN = 0.1, 200, 1000  # that slow runs have nodes of their own
_FELL = 0.01  # of accuracy
_SHOWN = 4
INFERRED = "inferred"  # of the work of a step: nobody has stated it
_SOURCES = {
    "auto": "measured by the start-up hook",
    "meter": "measured by the meter",
    METRIC_LINES: "read from [METRIC] lines",
    WALL_TIME: WALL_TIME,
    OF_EPOCHS: f"measured over {OF_EPOCHS}",
} | {
    name: f"measured by the adapter for {name.capitalize()}"
    for name in ("lightning", "transformers", "accelerate")
}


@dataclass(frozen=True)
class Caveat:
    """A clause that can follow a semicolon, or stand before the sentence."""

    text: str
    doubts: bool = False  # whether intervals do not hold, so that no sentence is sure
    first: bool = False  # whether it comes before all that is said


def caveats(results: Results, unit: str, request: Size | None = None) -> list[Caveat]:
    """The caveats of a study, the gravest first; request: the size that is recommended."""
    series = request.series if request else None
    compared = [s for s in results.sizes if s.efficiency and series in (None, s.series)]
    slow = _slow_nodes(results, request)
    busy = busy_clause(results.rows[run] for size in results.sizes for run in size.ok_runs)
    lines = [
        *([Caveat(busy, doubts=True, first=True)] if busy else []),
        *_idle(results, compared, unit),
        *_failed(results, series, unit),
        *_learning(results, compared, unit),
        *slow,
        *_different(results, compared, unit),
        *_unsteady(results),
        *_drift(results),
        *_in_order(results, compared),
        *_shared_nodes(results),
        *_same_nodes(results, compared),
        *_few(results, compared, unit),
        *(_outlying(results, series) if not slow else []),
        *_inferred(results),
    ]
    return list(dict.fromkeys(lines))


def where(size: Size, unit: str) -> str:
    """How many GPUs and, where there are several nodes, on how many."""
    count = size.world_size if unit == "ranks" else size.devices
    on = f" on {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
    return f"{counted_ranks(count or size.world_size or 0, unit)}{on}"


def _noun(unit: str) -> str:
    return "GPUs" if unit == "GPUs" else "ranks"


def _idle(results: Results, compared: Sequence[Size], unit: str) -> list[Caveat]:
    """Data that every size waits for, and GPUs that are idle."""
    waits = [_wait(rows_of(results, size)) for size in compared]
    known_waits = [wait for wait in waits if wait is not None]
    if known_waits and len(known_waits) == len(waits) and min(known_waits) >= _WAITING:
        low, high = f"{min(known_waits):.0%}", f"{max(known_waits):.0%}"
        share = low if low == high else f"{low} to {high}"
        return [
            Caveat(f"every size waits for data {share} of the time: mend that first", first=True)
        ]
    known = [s for s in compared if s.gpu_busy is not None]
    worst = min(known, key=lambda s: s.gpu_busy or 0, default=None)
    if worst is None or (worst.gpu_busy or 0) >= BUSY:
        return []
    text = f"the host is the limit: {where(worst, unit)} are busy {worst.gpu_busy:.0%} of the time"
    return [Caveat(text.replace("1 GPU are", "1 GPU is"), first=True)]


def _wait(rows: Sequence[Row]) -> float | None:
    """The share of the time that the runs of a size wait for data, as far as it was measured."""
    if (share := median_of(rows, "data_wait_share")) is not None:
        return share
    wait, whole = median_of(rows, "breakdown_data_wait_s"), median_of(rows, "breakdown_iteration_s")
    return None if wait is None or not whole else wait / whole


def _failed(results: Results, series: str | None, unit: str) -> list[Caveat]:
    """The size of the series of which most runs failed, and why."""
    bad = [s for s in results.sizes if s.not_ok and series in (None, s.series)]
    if not bad:
        return []
    worst = max(bad, key=lambda s: (len(s.not_ok) / s.runs_planned, s.world_size or 0))
    of = f" with {worst.series}" if series is None else ""
    count = f"{len(worst.not_ok)} of {worst.runs_planned} runs"
    verb = outcome_of(results, worst)
    verb = verb if verb.startswith("failed") else f"are {verb}"
    return [Caveat(f"on {where(worst, unit)}{of} {count} {verb}")]


def outcome_of(results: Results, size: Size) -> str:
    """What became of the runs of a size that are not ok: missing, or failed with a reason."""
    if all(status in UNDER_WAY for status in size.not_ok):
        return "not finished"
    status, reason = size.not_ok[0], reason_of(results, size)
    return status if reason == status else f"failed ({reason})"


def reason_of(results: Results, size: Size) -> str:
    """Why the runs of a size are not ok: the reason of most, in a few words."""
    runs, same = results.runs, results.runs["series"] == size.series
    for name in ("world_size", "nodes"):
        same &= (runs[name] == getattr(size, name)).fillna(False)
    bad = runs[same & ~runs["status"].isin(["ok", *UNDER_WAY])]
    reasons = bad["reason"].fillna(bad["status"]) if "reason" in bad else bad["status"]
    text = str(reasons.mode().iloc[0]) if len(reasons) else size.not_ok[0]
    text = re.sub(r"^(rank \d+: )?([\w.]*(Error|Exception): )?", "", text).split(". ")[0].strip()
    return text if len(text) <= 50 else f"{text[:47].rsplit(' ', 1)[0]} ..."


def _learning(results: Results, compared: Sequence[Size], unit: str) -> list[Caveat]:
    """An accuracy that falls by points from the smallest size on."""
    for name in dict.fromkeys(s.series for s in compared):
        own = [s for s in compared if s.series == name]
        rows = [rows_of(results, s) for s in (own[0], own[-1])]
        epochs = [values_of(r, "epochs_done") for r in rows]
        small, large = (
            [v for row in runs if (v := row.get("val_accuracy")) is not None] for runs in rows
        )
        if own[0] is own[-1] or not small or not large or epochs[0] != epochs[1]:
            continue
        if min(small) <= max(large) or median(small) - median(large) < _FELL:
            continue
        ends = f"{say_accuracy(median(small))} to {say_accuracy(median(large))}"
        return [
            Caveat(f"accuracy falls from {ends} on {own[-1].devices} {_noun(unit)}: tune first")
        ]
    return []


def _slow_nodes(results: Results, request: Size | None) -> list[Caveat]:
    """Nodes that are in slow runs only: the rates of a size split in two where they take part."""
    rows = _rated(results, "node_list")
    logs, nodes = list[float](), list[set[str]]()
    groups = defaultdict[Any, list[int]](list)
    for size, row, rate in rows:
        groups[size.place].append(len(logs))
        logs.append(math.log(rate))
        nodes.append({n for n in str(row["node_list"]).split(",") if n})
    rest = np.array(logs)
    for members in groups.values():
        rest[members] -= rest[members].max()
    repeated = [i for members in groups.values() if len(members) > 1 for i in members]
    order = sorted(rest[i] for i in repeated)
    gaps = [(high - low, low) for low, high in pairwise(order)]
    if not gaps or max(gaps)[0] < _SLOW_NODE / 2:
        return []
    limit = max(gaps)[1]
    slow = [i for i in repeated if rest[i] <= limit]
    fast = [i for i in repeated if rest[i] > limit]
    only = _exclusive(nodes, slow, fast)
    if len(slow) < 2 or not all(nodes[i] & only for i in slow):
        return []
    if _by_chance(nodes, groups.values(), slow) > _BY_CHANCE:
        return []
    drop = -math.expm1(median(rest[i] for i in slow) - median(rest[i] for i in fast))
    if drop < _SLOW_NODE:
        return []
    kept = {row["run_id"] for (_, row, _), of in zip(rows, nodes, strict=True) if not of & only}
    text = f"runs on {_some(sorted(only))} are {drop:.0%} slower"
    alone = _efficiency_of(results, request, kept)
    text += f": without them parallel efficiency is {alone:.0%}" if alone else ""
    return [Caveat(text, doubts=True)]


def _exclusive(nodes: Sequence[set[str]], slow: Sequence[int], fast: Sequence[int]) -> set[str]:
    """The nodes of slow runs that no fast run had."""
    return set[str]().union(*(nodes[i] for i in slow)) - set[str]().union(*(nodes[i] for i in fast))


def _by_chance(
    nodes: Sequence[set[str]], groups: Iterable[Sequence[int]], slow: Sequence[int]
) -> float:
    """How often as many slow runs of each size, drawn by lot, would have nodes of their own."""
    generator, hits = np.random.default_rng(0), 0
    repeated = [members for members in groups if len(members) > 1]
    if len(nodes) > _MAX_DRAWN:  # of so many runs none has nodes of its own by chance
        return 0.0
    for _ in range(_DRAWS):
        drawn = {
            int(i)
            for members in repeated
            for i in generator.choice(members, len({*members} & {*slow}), replace=False)
        }
        others = [i for members in repeated for i in members if i not in drawn]
        only = _exclusive(nodes, [*drawn], others)
        hits += all(nodes[i] & only for i in drawn)
    return hits / _DRAWS


def _efficiency_of(results: Results, size: Size | None, kept: set[str]) -> float | None:
    """The efficiency of a size by some of the runs; None where they are not on both sizes."""
    base = base_of(results, size)
    if size is None or base is None or not size.devices or not base.devices:
        return None
    own, other = (
        [x for run, x in zip(s.rated_runs, s.rates, strict=True) if run in kept]
        for s in (size, base)
    )
    return median(own) / median(other) * base.devices / size.devices if own and other else None


def _rated(results: Results, *names: str) -> list[tuple[Size, dict[str, Any], float]]:
    """The runs of all sizes with a rate and these columns."""
    return [
        (size, row, rate)
        for size in results.sizes
        for run, rate in zip(size.rated_runs, size.rates, strict=True)
        if rate > 0 and all((row := results.rows[run]).get(name) is not None for name in names)
    ]


def _different(results: Results, compared: Sequence[Size], unit: str) -> list[Caveat]:
    """Devices, commits, drivers or clocks that differ between a size and its base."""
    for size in sorted(compared, key=lambda s: -(s.world_size or 0)):
        base = base_of(results, size)
        if base is None or base == size:
            continue
        found = [text for text in differences(results, size, base) if text.endswith(")")]
        if found:
            return [Caveat(f"{where(size, unit)} had {' and '.join(found[:2])}", doubts=True)]
    mixed = [
        f"runs of one size differ in {name.replace('_', ' ')}"
        for name in ("device", "git_commit", "driver_version")
        for size in compared
        if len(values_of(rows_of(results, size), name)) > 1
    ]
    return [Caveat(text, doubts=True) for text in dict.fromkeys(mixed)]


def _unsteady(results: Results) -> list[Caveat]:
    """Rates that rise or fall within the runs: a warm-up left in, or clocks that fall."""
    fits = defaultdict[Any, list[tuple[float, float]]](list)  # change over a run, weight
    squares, free, curves = 0.0, 0, _curves(results)
    for size in results.sizes:
        for rates in (curves.get(run, []) for run in size.ok_runs):
            if len(rates) < 3:
                continue
            logs, at = np.log(rates), np.linspace(-0.5, 0.5, len(rates))
            weight = float((at**2).sum())
            change = float((at * logs).sum()) / weight
            squares += float(((logs - logs.mean() - change * at) ** 2).sum())
            free += len(rates) - 2
            fits[size.place].append((change, weight))
    changes = []
    for own in fits.values():
        middle, weight = median(change for change, _ in own), sum(weight for _, weight in own)
        error = math.sqrt(squares / free / weight)
        same = all(change * middle > 0 for change, _ in own)
        if same and abs(middle) > max(_UNSTEADY, _SURE * error):
            changes.append(math.expm1(middle))
    if not changes:
        return []
    largest = max(changes, key=abs)
    verb, why = ("rise", "a warm-up") if largest > 0 else ("fall", "falling clocks")
    text = f"rates still {verb} by {abs(largest):.0%} within runs, as in {why}: train longer"
    return [Caveat(text, doubts=True)]


def _curves(results: Results) -> dict[str, list[float]]:
    """By run_id: the rates of its epochs after the first, else of its windows, in their order."""
    curves: dict[str, list[float]] = {}
    epochs = results.epochs
    timed = epochs[epochs["images_per_s"].gt(0).fillna(False)]
    for run, group in timed.groupby("run_id", sort=False):
        ordered = group.sort_values(["attempt", "epoch"])["images_per_s"].astype(float).tolist()
        curves[str(run)] = ordered[1:]
    steps = results.steps
    sound = steps["throughput"].gt(0).fillna(False) & ~steps["warmup"].fillna(False).astype(bool)
    for run, group in steps[sound].groupby("run_id", sort=False):
        if len(group) >= 6:  # thirds of the windows: they are of different lengths
            windows = group["throughput"].astype(float).to_numpy()
            curves.setdefault(str(run), [float(np.median(p)) for p in np.array_split(windows, 3)])
    return curves


def _drift(results: Results) -> list[Caveat]:
    """Rates that change with the time of the start, among the repeats of the sizes."""
    groups = defaultdict[Any, list[tuple[float, float]]](list)
    for size, row, rate in _rated(results, "start_time_s"):
        groups[size.place].append((float(row["start_time_s"]), math.log(rate)))
    pairs = [
        np.array(group) - np.mean(group, axis=0) for group in groups.values() if len(group) > 1
    ]
    free = sum(len(p) - 1 for p in pairs) - 1
    if free < 3:
        return []
    times, logs = np.concatenate(pairs).T
    spread = float((times**2).sum())
    if not spread:
        return []
    slope = float((times * logs).sum()) / spread
    error = math.sqrt(float(((logs - slope * times) ** 2).sum()) / free / spread)
    starts = [t for group in groups.values() for t, _ in group]
    change = slope * (max(starts) - min(starts))
    if abs(change) < _DRIFT or (error and tail(abs(slope) / error, free) > _CHANCE):
        return []
    return [Caveat(f"rates drift by {math.expm1(change):+.0%} over the study", doubts=True)]


def _in_order(results: Results, compared: Sequence[Size]) -> list[Caveat]:
    """Sizes that ran one after the other, small ones first or last."""
    spans, places = defaultdict[Any, list[float]](list), {s.place for s in compared}
    for size, row, _ in _rated(results, "start_time_s"):
        if size.place in places:
            spans[size.world_size].append(float(row["start_time_s"]))
    order = [spans[n] for n in sorted(spans)]
    rising = all(max(a) < min(b) for a, b in pairwise(order))
    falling = all(min(a) > max(b) for a, b in pairwise(order))
    repeated = any(len(times) > 1 for times in order)
    if len(order) < 3 or not repeated or not (rising or falling):
        return []
    return [Caveat("sizes ran in their order, so a drift looks like scaling: shuffle them", True)]


def _same_nodes(results: Results, compared: Sequence[Size]) -> list[Caveat]:
    """Repeats of each size on one set of nodes, where the sizes have different ones."""
    lists, places = defaultdict[Any, list[str]](list), {s.place for s in compared}
    for size, row, _ in _rated(results, "node_list"):
        if size.place in places:
            lists[size.place].append(",".join(sorted(str(row["node_list"]).split(","))))
    repeated = [own for own in lists.values() if len(own) > 1]
    if not repeated or any(len({*own}) > 1 for own in repeated):
        return []
    if len({own[0] for own in lists.values()}) < 2:
        return []
    text = "repeats shared their nodes: intervals are too narrow"
    return [Caveat(text, doubts=True)]


def _shared_nodes(results: Results) -> list[Caveat]:
    """Runs of a study on Slurm that ran on the same node at the same time."""
    needed = ["job_id", "node_list", "start_time_s", "end_time_s"]
    runs = results.runs[["run_id", "status", *needed]].dropna(subset=needed)
    nodes, names, jobs = set[str](), set[str](), list[bool]()  # jobs: whether both are of one
    ok = set(runs["run_id"][runs["status"] == "ok"])  # a failed run may have disturbed these
    newest: dict[str, tuple[float, str, Any]] = {}  # by node: the latest end, and whose it is
    for run in records(runs.sort_values("start_time_s")):
        for node in set(run["node_list"].split(",")):
            end, before, job = newest.get(node, (0.0, "", None))
            disturbed = {before, run["run_id"]} & ok
            if run["start_time_s"] < end and disturbed:
                nodes.add(node)
                names |= disturbed
                jobs.append(job == run["job_id"])
            own = run["end_time_s"], run["run_id"], run["job_id"]
            newest[node] = max((end, before, job), own, key=lambda last: last[0])
    if not names:
        return []
    advice = ["--exclusive"] * (not all(jobs)) + ["--max-running 1"] * any(jobs)
    text = f"{counted(len(names), 'run')} shared nodes ({_some(sorted(nodes))}) with others: use "
    return [Caveat(f"{text}{' and '.join(advice)}", doubts=True)]


def _few(results: Results, compared: Sequence[Size], unit: str) -> list[Caveat]:
    """Sizes of one run, and an efficiency above ideal."""
    lines = []
    base = base_of(results, compared[-1]) if compared else None
    apart = max((max(s.rates) / min(s.rates) - 1 for s in compared if s.rates), default=0)
    if apart > _APART:
        lines.append(Caveat(f"repeats differ by up to {apart:.0%}"))
    if base and len(base.rates) == 1:
        once = all(len(s.rates) < 2 for s in compared)
        text = (
            "one run a size: differences may be chance"
            if once
            else (f"the base, {where(base, unit)}, is one run: repeat it")
        )
        lines.append(Caveat(text))
    several = [s for s in compared if (s.devices or 0) > 1]
    top = max(several, key=lambda s: s.efficiency or 0, default=None)
    if top and base and (top.efficiency or 0) > _ABOVE_IDEAL:
        text = f"{top.efficiency:.0%} on {where(top, unit)} is above ideal: repeat the base, "
        lines.append(Caveat(f"{text}{where(base, unit)}"))
    return lines


def _outlying(results: Results, series: str | None) -> list[Caveat]:
    """Runs far from the median of their size: one far above may be the only sound one."""
    found = []
    for size in results.sizes:
        names = size.outliers.split(", ") if size.outliers and series in (None, size.series) else []
        shares = zip(size.rated_runs, size.rates, strict=True)
        found += [f"{r} {x / median(size.rates) - 1:+.0%}" for r, x in shares if r in names]
    if not found:
        return []
    return [Caveat(f"{counted(len(found), 'outlier')} among the repeats ({_some(found)})")]


def _inferred(results: Results) -> list[Caveat]:
    """A rate of samples that nobody has stated."""
    ok = results.runs["status"] == "ok"
    known = results.runs.loc[ok, ["throughput", "work_source"]].dropna(subset=["throughput"])
    own = known[known["work_source"] == INFERRED]
    if own.empty:
        return []
    of = "" if len(own) == len(known) else f" in {len(own)} of {len(known)} runs"
    return [Caveat(f"samples are inferred from the batches{of}: state --work-per-step")]


def rate_sources(runs: pd.DataFrame) -> list[str]:
    """What measured the runs' rates, each source once, and whether the samples are inferred."""
    known = runs.dropna(subset=["throughput_source"])
    texts = []
    for source, own in known.groupby("throughput_source", sort=True):
        words = _SOURCES.get(str(source), f"read by {source}")
        inferred = (own["work_source"] == INFERRED).any()
        texts.append(words + (", samples inferred from the batches" if inferred else ""))
    return texts


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
