"""The five lines that a study comes to, at most 100 words.

What to request, the fastest, where efficiency falls and why, what learning and memory do, and how
many runs are ok. A line that has nothing to say is left out.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings import conditions
from jobkit.analysis.findings.causes import base_of, cause_of, late_of, values_of
from jobkit.analysis.findings.conditions import Caveat
from jobkit.analysis.scaling import MIN_EFFICIENCY, scaling
from jobkit.analysis.scaling.sizes import Size, fewest_nodes, where
from jobkit.analysis.tables.text import rounded, say, say_accuracy, sentence, some

MAX_WORDS = 100
_SHOWN = 3  # series
_AT = " at 95%"  # the confidence of an interval
_MORE = 1.05  # times the least memory: worth a word
_SHORT_S = 0.001  # below it, what an epoch costs is no help
_MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "val_loss": ("loss", "{:.4g}".format),
    "val_accuracy": ("accuracy", say_accuracy),
}


def verdict(results: Results, unit: str, least: float = MIN_EFFICIENCY) -> list[str]:
    """The lines, the most important first. unit: GPUs, or ranks.

    Of several kinds of scaling, units, models or data they are of what is first in the table.
    """
    measured = [s for s in first_kind(results.sizes, ranked=True) if s.throughput is not None]
    total, ok = len(results.runs), int((results.runs["status"] == "ok").sum())
    runs = f"{ok} of {total} runs ok" if ok < total else f"All {total} runs ok"
    runs = runs if total > 1 or not ok else "The one run is ok"
    failed = conditions.failure(results, results.sizes, unit)
    if not measured:
        ends = "; ".join(filter(None, [runs, failed]))
        return ["Nothing was measured: no successful run has a rate.", f"{ends}."]
    request, doubts = _request(results, measured, unit, least)
    if failed and failed not in [c.text for c in doubts]:
        runs += f"; {failed}"
    later = [c for c in doubts if not c.first]
    grave = [c.text for c in later if c.grave or c is later[0]]
    first = [*(sentence(c.text) for c in doubts if c.first), request]
    kind = scaling.kind_of(measured[0])
    rest = sorted({scaling.kind_of(s) for s in results.sizes if s.throughput} - {kind})
    words = (" of ".join(part for part in other if part not in ("", *kind)) for other in rest)
    others = [*filter(None, dict.fromkeys(words))]
    kinds = f" The table has {some(others, 2)} too." * bool(others)
    left = MAX_WORDS - len(f"{' '.join(first)} {kinds} {runs}".split())

    def fitting(*texts: str) -> list[str]:
        """The texts for which words are left, in their order."""
        nonlocal left
        shown = []
        for text in texts:
            if text and left >= len(text.split()):
                left -= len(text.split())
                shown.append(text)
        return shown

    # What matters most has words first; the rest stands in a table or figure.
    after = fitting(*grave)
    text = _limits(results, measured, unit, least)
    limits = fitting(text) or fitting(re.split("; |, because ", text)[0] + "." * bool(text))
    best = fitting(_fastest(results, measured, unit, least))
    changed, steady = _learning(results, unit, doubts)
    learnt = fitting(changed)
    after += fitting(*(c.text for c in later if c.text not in grave))
    learnt += fitting(steady, _memory(results, unit))
    lines = [f"{'; '.join([' '.join(first), *after])}.{kinds}", *best, *limits, " ".join(learnt)]
    return [*filter(None, lines), f"{runs}."]


def request_of(results: Results, least: float = MIN_EFFICIENCY) -> Size | None:
    """The size to request, of the kind of scaling that is first in the table."""
    sizes = [s for s in first_kind(results.sizes, ranked=True) if s.throughput is not None]
    return None if conditions.disturbed(results) else _size_to_request(sizes, least)


def first_kind(sizes: Sequence[Size], *, ranked: bool = False) -> list[Size]:
    """The sizes of the kind of scaling and of the unit that are first in the table.

    ranked: of the first model and data set alone; others are drawn beside them, but not ranked.
    """
    first = min(sizes, key=lambda s: s.throughput is None, default=None)
    end = None if ranked else 1
    return [s for s in sizes if first and scaling.kind_of(s)[:end] == scaling.kind_of(first)[:end]]


def _size_to_request(sizes: Sequence[Size], least: float) -> Size | None:
    """Of each series its largest efficient size; the fastest of these. None where there is none.

    The efficiency has to be least at every size up to it, or beyond a dip be above least with its
    interval. A size counts only where most of its runs are ok and no other series is faster on no
    more GPUs and nodes.
    """
    found = []
    for name in dict.fromkeys(s.series for s in sizes):
        line = [s for s in fewest_nodes(sizes, name) if s.efficiency is not None]
        others = [s for s in sizes if s.base_series == name and not s.is_base]
        if not line or (len(line) < 2 and line[0].is_base and not others):
            continue
        below = next((i for i, s in enumerate(line) if (s.efficiency or 0) < least), len(line))
        sound = [
            s
            for i, s in enumerate(line)
            if (i < below or (s.efficiency_low or 0) > least) and 2 * s.runs_ok > s.runs_planned
        ]
        found += sound[-1:] or ([line[0]] if line[0].is_base else [])
    compared = [s for s in sizes if s.efficiency is not None]
    found = [size for size in found if not any(_is_faster(other, size) for other in compared)]
    best = max(found, key=lambda s: s.throughput or 0, default=None)
    if best is None or best.devices != 1:
        return best
    pool = scaling.spread_of(sizes)
    singles = (s for s in found if scaling.is_single(s))
    return next((s for s in singles if not scaling.surely_faster(best, s, pool)), best)


def _is_faster(other: Size, size: Size) -> bool:
    """Whether another series is faster on no more GPUs and nodes, by the intervals if known."""
    more = (other.devices or 0) > (size.devices or 0) or (other.nodes or 0) > (size.nodes or 0)
    if more or other.series == size.series:
        return False
    low, high = other.throughput_low, size.throughput_high
    if low is None or high is None:
        low, high = other.throughput, scaling.FASTER * (size.throughput or 0)
    return (low or 0) > (high or 0)


def _request(
    results: Results, sizes: Sequence[Size], unit: str, least: float
) -> tuple[str, list[Caveat]]:
    """What to request, without a full stop, and the caveats that follow it."""
    size = request_of(results, least)
    doubts = conditions.caveats(results, unit, size)
    if conditions.disturbed(results):
        return "Until then nothing can be requested", doubts
    if size is None:
        notes = [s.note for s in sizes if s.note and s.note.startswith("not compared")]
        if notes and all(s.efficiency is None for s in sizes):
            why, *_ = notes[0].split(": nothing shows")  # a caveat says it of copies
            return f"Nothing can be requested: {why}", doubts
        why = f"no size beyond the base has {100 * least:g}% parallel efficiency"
        if len({s.place[1:] for s in sizes}) == 1:
            why = "only one was measured"
        return f"No size to request: {why}", doubts
    text = f"Request {where(size, unit)} with {size.series}"
    base = base_of(results, size)
    if base is None or size is base:
        return text, doubts
    same = base.series == size.series
    over = where(base, unit) if same else f"{base.series} on {where(base, unit)}"
    text += f": {say(size.speed_up, '{:.3g}')} times {over}, parallel efficiency "
    text += share_of(size, least, _AT) + _busy(size)
    if size.time_s is not None and size.time_s >= _SHORT_S:
        hours = say(size.node_hours, "{:.2g}")
        hours = f" and {hours} node-hours" * (size.node_hours is not None)
        text += f", {say(size.time_s, '{:.3g}')} s{hours} per {size.time_of}"
    if _unsure(size, least, doubts) and (size.efficiency_low or 0) <= least:
        small = f"{base.devices} and " if same else ""
        undecided = f"undecided whether above {100 * least:g}%: repeat {small}{_short(size, unit)}"
        doubts = [Caveat(undecided, grave=True), *doubts]
    return text, doubts


def percent(efficiency: float | None, least: float) -> str:
    """An efficiency in per cent, with a decimal where it would be rounded to the threshold."""
    near = efficiency is not None and abs(efficiency - least) < 0.005 and efficiency != least
    return say(efficiency, "{:.1%}" if near else "{:.0%}")


def share_of(size: Size, least: float, at: str = "") -> str:
    """The efficiency with its interval; at: the words on its confidence."""
    ends = size.interval("efficiency")
    text = percent(size.efficiency, least)
    if ends is None or ends[0] == ends[1]:
        return text
    low, high = (percent(end, least).removesuffix("%") for end in ends)
    return f"{text} [{low}, {high}{at}]"


def _busy(size: Size) -> str:
    """The share of time in which the GPUs computed, beside an efficiency."""
    return f" (GPUs busy {size.gpu_busy:.0%})" if size.gpu_busy is not None else ""


def _unsure(size: Size, least: float, doubts: Sequence[Caveat]) -> bool:
    """Whether the efficiency may be on the other side of the threshold."""
    ends = size.interval("efficiency")
    if ends is None or len(size.rates) < 2 or any(c.doubts for c in doubts):
        return True
    return ends[0] <= least <= ends[1]


def _fastest(results: Results, sizes: Sequence[Size], unit: str, least: float) -> str:
    """The fastest size, and the series that may be as fast; nothing where none is compared."""
    pool = scaling.spread_of(results.sizes)
    # What must not be compared, as copies of one program, is not the fastest either.
    known = [s for s in sizes if s.efficiency is not None] or [s for s in sizes if not s.note]
    if not known:
        return ""
    best = max(known, key=lambda s: s.throughput or 0)
    same = [s for s in sizes if (s.series, s.devices) == (best.series, best.devices)]
    on = where(best, unit) if len(same) > 1 else _short(best, unit)
    text = f"Fastest: {best.series} on {on}, "
    text += f"{rounded(best.throughput or 0)} {best.throughput_unit}"
    if best.efficiency is not None and not best.is_base:
        text += f" at {percent(best.efficiency, least)} efficiency{_busy(best)}"
    text += _of_few(best)
    equal = [s for s in known if s is not best and not scaling.surely_faster(best, s, pool)]
    others = [s for s in equal if s.series != best.series]
    names = [s.series for s in others if scaling.comparable_at(s) == scaling.comparable_at(best)]
    smaller = [s for s in equal if (s.devices or 0) < (best.devices or 0)]
    if few := min(smaller, key=lambda s: s.devices or 0, default=None):
        names.insert(0, f"{few.series} on {_short(few, unit)}")
    return f"{text}; {some(names, _SHOWN)} may be as fast." if names else f"{text}."


def _of_few(size: Size) -> str:
    """How many runs a number is of, where others failed."""
    return f" ({size.runs_ok} of {size.runs_planned} runs)" if size.not_ok else ""


def _limits(results: Results, measured: Sequence[Size], unit: str, least: float) -> str:
    """Where efficiency falls below the threshold, and why; else how far it was seen to hold."""
    falls, holds, names = list[Size](), list[Size](), dict.fromkeys(s.series for s in measured)
    for name in names:
        line = [s for s in fewest_nodes(measured, name) if s.efficiency is not None]
        line = [s for s in line if (s.devices or 0) > 1]  # one is compared, and does not scale
        below = [s for s in line if (s.efficiency or 0) < least]
        falls += below[:1]
        holds += [s for s in line[-1:] if not below and not s.is_base]
    if not (shown := falls or holds):
        return ""
    request = request_of(results, least)
    own = next((s for s in shown if request and s.series == request.series), shown[0])
    size, share = _short(own, unit), share_of(own, least, _AT) + _busy(own)
    text = f"{size} ({own.series}: {share})" if len(names) > 1 else f"{size}: {share}"
    text += _of_few(own)
    line = fewest_nodes(measured, own.series)
    beside = [s for s in measured if s.series == own.series and s not in line and s.efficiency]
    on_more = "".join(f"; {where(s, unit)}: {percent(s.efficiency, least)}" for s in beside[:2])
    unsure = _unsure(own, least, conditions.caveats(results, unit))
    if not falls:
        verb = "seems to stay" if unsure else "stays"
        return f"Efficiency {verb} above {100 * least:g}% up to {text}{on_more}."
    verb = "seems to fall" if unsure else "falls"
    if conditions.disturbed(results):
        cause = f"; no cause is named while other programs use the cores{late_of(results, own)}"
    else:
        cause = cause_of(results, own)
    return f"Efficiency {verb} below {100 * least:g}% at {text}{cause}{on_more}."


def _short(size: Size, unit: str) -> str:
    """How many GPUs; the request and the tables say on how many nodes."""
    return where(replace(size, nodes=1), unit)


def _learning(results: Results, unit: str, doubts: Sequence[Caveat]) -> tuple[str, str]:
    """What loss and accuracy do with the size, unless a caveat has said it; which do nothing."""
    parts, steady = list[str](), list[str]()
    for column, (name, form) in _MEASURES.items():
        found = conditions.changes(results, results.sizes, column)
        change = next((c for c in found if c.matters), None)
        if found and not change and conditions.alike(results, column):
            steady.append(name)
        if change is None or any(c.text.startswith(f"{name} ") for c in doubts):
            continue
        on = f"{_short(change.size, unit)} ({change.size.series})"
        parts.append(f"{name} {change.words(form)} on {on}")
    changed = sentence("; ".join(parts)) if parts else ""
    return changed, sentence(f"{', '.join(steady)}: unchanged") if steady else ""


def _memory(results: Results, unit: str) -> str:
    """The peak memory of the series at the largest size that several have; else nothing."""
    groups = defaultdict[tuple[object, ...], list[Size]](list)
    for size in results.sizes:
        # The one process of dp drives several GPUs, and its peak is that of the first.
        known = size.peak_memory_mib or "oom" in size.not_ok
        if known and size.devices == size.world_size and not size.note:
            groups[scaling.comparable_at(size)].append(size)
    for group in sorted(groups.values(), key=lambda g: -(g[0].world_size or 0)):
        rows = [results.rows[run] for size in group for run in size.ok_runs]
        full = [s.series for s in group if "oom" in s.not_ok]
        fit = [s for s in group if s.series not in full]
        if len(group) > 1 and fit and len(values_of(rows, "device_type")) < 2:
            low, high = (end(fit, key=lambda s: s.peak_memory_mib or 0) for end in (min, max))
            near = (high.peak_memory_mib or 0) < _MORE * (low.peak_memory_mib or 0)
            apart = conditions.differ(low.peaks_memory_mib, high.peaks_memory_mib)
            if not full and (near or not apart):
                return ""
            least, most = (
                f"{s.series} {x / 1024:.2g} GiB" if x >= 1024 else f"{s.series} {x:.0f} MiB"
                for s in (low, high)
                if (x := s.peak_memory_mib)
            )
            rest = f"; {some(full, _SHOWN)} ran out of memory" if full else f", most {most}"
            return f"Least memory on {_short(low, unit)}: {least}{rest}."
    return ""
