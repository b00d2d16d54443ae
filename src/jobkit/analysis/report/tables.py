"""The tables of the report: scaling for a proposal, a whole project, what runs cost beside."""

import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.conditions import caveats
from jobkit.analysis.findings.forecast import SOURCES, Forecast, forecast_table
from jobkit.analysis.findings.verdict import LEAST, request_of
from jobkit.analysis.scaling.scaling import OWN_BASE, SERIAL_BASE
from jobkit.analysis.scaling.sizes import EPOCH, IMAGES, Size
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import (
    TextTable,
    counted,
    rounded,
    say,
    say_accuracy,
    with_interval,
)
from jobkit.errors import UsageError

_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_STARTUP = ("import_s", "group_s", "data_s", "model_s", "compile_s")


def devices_of(size: Size, unit: str) -> int | None:
    """The GPUs or processes of a size: one process of dp drives several GPUs."""
    return size.world_size if unit == "ranks" else size.devices or size.world_size


def time_per(sizes: Sequence[Size]) -> str:
    """What the time of these sizes is of."""
    names = list(dict.fromkeys(s.time_of for s in sizes))
    return f"per {names[0]}" if len(names) == 1 else "per amount of work"


def proposal_table(results: Results, unit: str, least: float = LEAST) -> TextTable:
    """The scaling of a study, a row for each series and size, with its base and its caveats.

    unit: GPUs, or processes (ranks). What is the same in all rows is a note, so that the table fits
    a page.
    """
    sizes, per = results.sizes, time_per(results.sizes)
    columns: list[tuple[str, list[str]]] = [("series", [s.series for s in sizes])]
    scalings = {s.scaling for s in sizes}
    if len(scalings) > 1:
        columns.append(("scaling", [say(s.scaling or "-") for s in sizes]))
    words = len(columns)
    columns.append((unit, [say(devices_of(s, unit)) for s in sizes]))
    if any((s.nodes or 1) > 1 for s in sizes):
        columns.append(("nodes", [say(s.nodes) for s in sizes]))
    columns.append(("runs ok", [f"{s.runs_ok} of {s.runs_planned}" for s in sizes]))
    columns.append((f"time {per} (s)", [say(_na(s.time_s), "{:.4g}") for s in sizes]))
    columns.append(("speed-up", [_cell(s, "speed_up", "{:.2f}") for s in sizes]))
    ends = [x for s in sizes for x in (s.efficiency, s.efficiency_low, s.efficiency_high) if x]
    near = any(abs(x - least) < 0.005 and x != least for x in ends)  # as the verdict rounds
    form = "{:.1%}" if near else "{:.0%}"
    columns.append(("parallel efficiency", [_cell(s, "efficiency", form) for s in sizes]))
    columns.append(("GPU busy", [say(_na(s.gpu_busy), "{:.0%}") for s in sizes]))
    hours = "GPU-hours" if unit == "GPUs" else "process-hours"
    columns.append((f"{hours} {per}", [say(_na(s.gpu_hours), "{:.3g}") for s in sizes]))
    columns.append((f"node-hours {per}", [say(_na(s.node_hours), "{:.3g}") for s in sizes]))
    target = next((s.target_accuracy for s in sizes if s.time_of == EPOCH and s.target_accuracy), 0)
    goal = say_accuracy(target, 0)
    times = [say(_na(s.time_to_accuracy_s), "{:.4g}") for s in sizes]
    columns.append((f"time to {goal} accuracy (s)", times))
    columns += _energy_columns(sizes, per, goal)
    shown = [
        (head, cells) for head, cells in columns if {*cells} != {"-"} or head.startswith("time per")
    ]
    kind = f"{scalings.pop() or 'Strong or weak'} scaling" if len(scalings) == 1 else ""
    rows = [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]
    heads = [head for head, _ in shown]
    return TextTable(heads, rows, words, notes(results, unit, kind, least))


def _na(value: Any) -> Any:
    return pd.NA if value is None else value


def _cell(size: Size, name: str, form: str) -> str:
    """A value as text with its interval in brackets; the base has none."""
    value, ends = getattr(size, name), size.interval(name)
    text = say(_na(value), form)
    if value is None or ends is None or ends[0] == ends[1]:
        return text
    low, high = (form.format(end) for end in ends)
    return f"{text} [{low.removesuffix('%')}, {high.removesuffix('%')}]"


def _energy_columns(sizes: Sequence[Size], per: str, goal: str) -> list[tuple[str, list[str]]]:
    """The columns of energy that were measured, with their heads; none of different scopes."""
    scopes = {s.joules_of for s in sizes if s.joules_of}
    units = {s.throughput_unit for s in sizes}
    if len(scopes) != 1:
        return []
    work = units.pop().partition("/")[0].removesuffix("s") if len(units) == 1 else "unit of work"
    heads = {
        "joules_per_work": f"J per {work} ({scopes.pop()})",
        "energy_kwh": f"kWh {per}",
        "kwh_to_accuracy": f"kWh to {goal} accuracy",
    }
    return [(head, [say(_na(getattr(s, k)), "{:.3g}") for s in sizes]) for k, head in heads.items()]


def notes(results: Results, unit: str, kind: str = "", least: float = LEAST) -> list[str]:
    """The table's notes: the base, the intervals, what the costs leave out, and all caveats."""
    sizes = results.sizes
    rules = [OWN_BASE] * any(s.is_base for s in sizes)
    other = sorted({s.baseline or "" for s in sizes if s.base_series not in (None, s.series)})
    bases = [text.removesuffix(f": {SERIAL_BASE}") for text in other]
    rules += [f"{SERIAL_BASE}, {' or '.join(bases)}"] * bool(bases)
    start = f"{kind[0].upper()}{kind[1:]}. " if kind else ""
    lines = [f"{start}Speed-up and parallel efficiency are relative to {' and '.join(rules)}."]
    repeated = [s for s in sizes if s.spread_from]
    if repeated:
        lines.append(
            "In brackets: 95% interval of the median over runs, from the spread of the repeats "
            "of all sizes by Student's t."
        )
    elif any(s.throughput for s in sizes):
        lines.append("No size has two successful repeats, so differences may be noise.")
    if any(s.gpu_hours for s in sizes):
        lines.append(
            "Hours and the time to an accuracy are means, of the training alone: "
            f"{_beside(results) or 'evaluation, checkpoints and start-up come on top'}."
        )
    found = caveats(results, unit, request_of(results, least))
    return lines + [f"{c.text[0].upper()}{c.text[1:]}." for c in found]


def _beside(results: Results) -> str:
    """How much evaluation, checkpoints and start-up add to the training."""
    table = run_costs(results)
    shares = [float(row[-1].rstrip("%")) for row in table.rows if row[-1] != "-"]
    if not shares:
        return ""
    low, high = min(shares), max(shares)
    share = f"{low:.0f}%" if low == high else f"{low:.0f} to {high:.0f}%"
    return f"evaluation, checkpoints and start-up come on top, {share} of it in these runs"


def run_costs(results: Results) -> TextTable:
    """What a whole run takes beside its training: means over the runs of one attempt."""
    runs = results.runs.dropna(subset=["total_time_s", "train_samples"])
    runs = runs[(runs["status"] == "ok") & (runs["attempts"].fillna(1) == 1)]
    epochs = results.epochs[results.epochs["images_per_s"].gt(0).fillna(False)]
    rows = []
    for size in results.sizes:
        own = runs[runs["run_id"].isin(size.ok_runs)]
        of_runs = epochs[epochs["run_id"].isin(own["run_id"])]
        if own.empty or of_runs.empty or size.throughput_unit != IMAGES:
            continue
        count = own["run_id"].nunique()
        seconds = (size.train_samples or 0) / of_runs["images_per_s"].astype(float)
        training, evaluation = seconds.sum() / count, float(of_runs["eval_time_s"].sum()) / count
        startup, total = (
            float(own[name].fillna(0).mean()) for name in ("startup_s", "total_time_s")
        )
        rest = total - training - evaluation - startup
        if training <= 0 or rest < 0:  # epochs of other attempts, or made-up records
            continue
        parts = [_mean(own, f"startup_{name}") for name in _STARTUP]
        cells = [f"{v:.3g}" for v in (total, training, evaluation, startup)]
        cells += ["-" if p is None else f"{p:.3g}" for p in parts]
        cells += [f"{rest:.3g}", f"{total / training - 1:.0%}"]
        rows.append([size.series, str(size.world_size), *cells])
    heads = ["series", "ranks", "whole run (s)", "training (s)", "evaluation (s)", "start-up (s)"]
    heads += [f"{name.removesuffix('_s').replace('_', ' ')} (s)" for name in _STARTUP]
    note = (
        "Means over the runs. The rest is checkpoints, records and the end of the processes. "
        "Node-hours and times to an accuracy are of the training alone."
    )
    return TextTable([*heads, "rest (s)", "beside training"], rows, 1, [note])


def _mean(runs: pd.DataFrame, name: str) -> float | None:
    values = [float(v) for v in runs[name].dropna()] if name in runs else []
    return fmean(values) if values else None


def parse_work(text: str) -> tuple[float, str]:
    """An amount of work as 300e9 tokens or 1.2M images; raises UsageError for none."""
    found = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([kMGBT]?)\s+(\w+)\s*", text)
    try:
        amount = float(found[1]) * _SCALES[found[2]] if found else 0.0
    except ValueError:
        amount = 0.0
    if not found or amount <= 0:
        raise UsageError(f"--work {text!r}: an amount and its unit, as '300e9 tokens'")
    return amount, found[3]


def project_table(
    results: Results, work: str, count: int, unit: str, forecasts: Sequence[Forecast] = ()
) -> TextTable:
    """The hours of a whole project at each size: count runs of an amount of work each.

    Raises UsageError where no size measures that unit.
    """
    amount, name = parse_work(work)
    epochs = name.rstrip("s") == EPOCH
    rows = []
    for size in results.sizes:
        per_s = size.time_amount / size.mean_time_s if size.time_amount and size.mean_time_s else 0
        of_unit = size.throughput_unit.partition("/")[0].rstrip("s") == name.rstrip("s")
        known = of_unit or (epochs and size.time_of == EPOCH)
        if not per_s or not size.devices or not known:
            continue
        units = amount * (size.time_amount or 0) if epochs and not of_unit else amount
        low, high = size.throughput_low, size.throughput_high
        ends = (
            [low / size.throughput, high / size.throughput]
            if low and high and size.throughput
            else []
        )
        rows.append(_project_row(size, units, per_s, ends, count, ""))
    for forecast in forecasts:
        for ranks in forecast.sizes if rows else ():
            base, rate = forecast.base, forecast.at(ranks).rate
            of_unit = base.throughput_unit.partition("/")[0].rstrip("s") == name.rstrip("s")
            units = amount if of_unit else amount * (base.time_amount or 0)
            ends = [end / rate[0] for end in rate[1:] if end == end]
            per_node = forecast.per_node or base.ranks_per_node or ranks
            size = _at(base, ranks, -(-ranks // per_node))
            rows.append(_project_row(size, units, rate[0], ends, count, "forecast"))
    if not rows:
        units_measured = sorted({s.throughput_unit.partition("/")[0] for s in results.sizes})
        raise UsageError(f"--work {work!r}: the study measured {' and '.join(units_measured)}")
    hours = "GPU-hours" if unit == "GPUs" else "process-hours"
    heads = ["series", unit, "nodes", "days per run", f"{hours}", "node-hours", "node-hours at 95%"]
    note = (
        f"{counted(count, 'run')} of {amount:,.4g} {name} each, by the mean rate of the training; "
        "evaluation, checkpoints, start-up, failures and trials come on top."
    )
    return TextTable(heads, rows, 1, [note])


def _at(base: Size, ranks: int, nodes: int) -> Size:
    return replace(base, world_size=ranks, devices=ranks, nodes=nodes)


def _project_row(
    size: Size, units: float, per_s: float, ends: Sequence[float], count: int, kind: str
) -> list[str]:
    seconds = units / per_s
    hours = count * seconds / 3600
    nodes = hours * (size.nodes or 1)
    interval = (
        f"{rounded(nodes / ends[1])} to {rounded(nodes / ends[0])}" if len(ends) == 2 else "-"
    )
    name = f"{size.series} ({kind})" if kind else size.series
    cells = [
        f"{seconds / 86400:.3g}",
        rounded(hours * (size.devices or 1)),
        rounded(nodes),
        interval,
    ]
    return [name, str(size.devices), str(size.nodes or 1), *cells]


def forecast_rows(results: Results, forecasts: Sequence[Forecast], unit: str) -> TextTable:
    """The forecasts with their nodes and node-hours; what a reader must know is in the notes."""
    table, per = forecast_table(results, forecasts), time_per(results.sizes)
    heads = ["series", unit, "nodes", "times the largest measured size", f"time {per} (s)"]
    heads += ["speed-up", "parallel efficiency", f"node-hours {per}"]
    rows = [
        [
            *(str(row["series"]), say(row["world_size"]), say(row["nodes"])),
            say(row["times_beyond"], "{:.3g}"),
            with_interval(row, "time", "{:.3g}", "_s"),
            with_interval(row, "speed_up", "{:.3g}"),
            with_interval(row, "efficiency", "{:.0%}"),
            with_interval(row, "node_hours", "{:.3g}"),
        ]
        for row in records(table)
    ]
    notes = [f"{f.caution[0].upper()}{f.caution[1:]}." for f in forecasts if f.sizes and f.caution]
    notes += [f"{remark[0].upper()}{remark[1:]}." for f in forecasts for remark in f.remarks]
    for law in dict.fromkeys(f.law for f in forecasts if f.sizes):
        notes.append(
            f"Not measured: {SOURCES[law]}, by how well they predict the measured sizes, with the "
            "95 % prediction interval of one more run. A slower network level counts as possible."
        )
    notes += [
        f"{f.series}: fitted without {counted(f.left_out, 'outlier')}."
        for f in forecasts
        if f.left_out and f.sizes
    ]
    notes += [f"No forecast: {why}." for f in forecasts for why in f.reasons]
    return TextTable(heads, rows, 1, notes)


def thread_lines(results: Results) -> list[str]:
    """A table of the ways in which the same cores were divided, and which is faster here.

    Empty where the runs on CPUs of one node did not divide the same cores in several ways. One way
    is called faster only where its slowest repeat beats the fastest of all others.
    """
    needed = ["threads_used", "world_size", "images_per_s"]
    runs = results.runs[[*needed, "status", "device_type", "nodes", "series"]].dropna(subset=needed)
    runs = runs[(runs["status"] == "ok") & (runs["device_type"] == "cpu") & (runs["nodes"] == 1)]
    ways: dict[tuple[int, int, str], list[float]] = {}  # processes, threads of each, series
    for run in records(runs):
        way = (int(run["world_size"]), int(run["threads_used"]), str(run["series"]))
        ways.setdefault(way, []).append(float(run["images_per_s"]))
    cores = max((processes * threads for processes, threads, _ in ways), default=0)
    rates = {way: each for way, each in ways.items() if way[0] * way[1] == cores}
    if len({threads for _, threads, _ in rates}) < 2:
        return []
    order = sorted(rates, key=lambda way: -median(rates[way]))
    texts = {
        way: f"{counted(way[0], 'process')} x {counted(way[1], 'thread')} ({way[2]})"
        for way in order
    }
    first = f"{counted(cores, 'core')} as threads or processes, the fastest first:"
    best, others = order[0], [rate for way in order[1:] for rate in rates[way]]
    if min(map(len, rates.values())) < 2:
        last = "one repeat alone does not say which is faster: --repeats 3"
    elif min(rates[best]) > max(others):
        last = f"{texts[best]} is faster than every other way in each repeat"
    else:
        last = "the repeats overlap: none is faster for certain"
    rows = [f"  {texts[way]}: {rounded(median(rates[way]))} {IMAGES}" for way in order]
    return [first, *rows, last]
