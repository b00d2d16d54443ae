"""The tables of the report: scaling for a proposal, a whole project, what runs cost beside."""

import re
from collections.abc import Sequence
from statistics import median

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


def time_per(sizes: Sequence[Size]) -> str:
    """What the time of these sizes is of."""
    names = {s.time_of for s in sizes}
    return f"per {names.pop()}" if len(names) == 1 else "per amount of work"


def proposal_table(results: Results, unit: str, least: float = LEAST) -> TextTable:
    """The scaling of a study, a row for each series and size, with its base and its caveats.

    unit: GPUs, or processes (ranks). What is the same in all rows is a note, so that the table fits
    a page.
    """
    sizes, per = results.sizes, time_per(results.sizes)
    hours = "GPU-hours" if unit == "GPUs" else "process-hours"
    goal = next((s.target_accuracy for s in sizes if s.time_of == EPOCH and s.target_accuracy), 0)
    ends = [x for s in sizes for x in (s.efficiency, s.efficiency_low, s.efficiency_high) if x]
    near = any(abs(x - least) < 0.005 and x != least for x in ends)  # as the verdict rounds

    def cells(name: str, form: str) -> list[str]:
        return [say(getattr(s, name), form) for s in sizes]

    scalings = {s.scaling or "-" for s in sizes}
    columns = {
        "series": [s.series for s in sizes],
        "scaling": [s.scaling or "-" for s in sizes] if len(scalings) > 1 else [],
        unit: [say(s.devices or s.world_size) for s in sizes],
        "nodes": cells("nodes", "{}") if any((s.nodes or 1) > 1 for s in sizes) else [],
        "runs ok": [f"{s.runs_ok} of {s.runs_planned}" for s in sizes],
        f"time {per} (s)": cells("time_s", "{:.4g}"),
        "speed-up": [_with_ends(s, "speed_up", "{:.2f}") for s in sizes],
        "parallel efficiency": [
            _with_ends(s, "efficiency", "{:.1%}" if near else "{:.0%}") for s in sizes
        ],
        "GPU busy": cells("gpu_busy", "{:.0%}"),
        f"{hours} {per}": cells("gpu_hours", "{:.3g}"),
        f"node-hours {per}": cells("node_hours", "{:.3g}"),
        f"time to {say_accuracy(goal, 0)} accuracy (s)": cells("time_to_accuracy_s", "{:.4g}"),
    }
    scopes = {s.joules_of for s in sizes if s.joules_of}
    if len(scopes) == 1:  # energy of different scopes is not compared
        units = {s.throughput_unit.partition("/")[0].removesuffix("s") for s in sizes}
        work = units.pop() if len(units) == 1 else "unit of work"
        columns[f"J per {work} ({scopes.pop()})"] = cells("joules_per_work", "{:.3g}")
        columns[f"kWh {per}"] = cells("energy_kwh", "{:.3g}")
        columns[f"kWh to {say_accuracy(goal, 0)} accuracy"] = cells("kwh_to_accuracy", "{:.3g}")
    shown = {
        head: column
        for head, column in columns.items()
        if {*column} - {"-"} or head.startswith("time per")
    }
    kind = ""
    if len(scalings) == 1:
        (scaling,) = scalings
        kind = f"{'Strong or weak' if scaling == '-' else scaling.capitalize()} scaling. "
    return TextTable(
        list(shown),
        [list(row) for row in zip(*shown.values(), strict=True)],
        2 if "scaling" in shown else 1,
        _notes(results, unit, kind, least),
    )


def _with_ends(size: Size, name: str, form: str) -> str:
    """A value as text with its interval in brackets; the base has none."""
    value, ends = getattr(size, name), size.interval(name)
    if value is None or ends is None or ends[0] == ends[1]:
        return say(value, form)
    low, high = (form.format(end).removesuffix("%") for end in ends)
    return f"{form.format(value)} [{low}, {high}]"


def _notes(results: Results, unit: str, kind: str, least: float) -> list[str]:
    """The table's notes: the base, the intervals, what the costs leave out, and all caveats."""
    sizes = results.sizes
    rules = [OWN_BASE] * any(s.is_base for s in sizes)
    other = sorted({s.baseline or "" for s in sizes if s.base_series not in (None, s.series)})
    bases = [text.removesuffix(f": {SERIAL_BASE}") for text in other]
    rules += [f"{SERIAL_BASE}, {' or '.join(bases)}"] * bool(bases)
    lines = [f"{kind}Speed-up and parallel efficiency are relative to {' and '.join(rules)}."]
    if any(s.spread_from for s in sizes):
        lines.append(
            "In brackets: 95% interval of the median over runs, from the spread of the repeats "
            "of all sizes by Student's t."
        )
    elif any(s.throughput for s in sizes):
        lines.append("No size has two successful repeats, so differences may be noise.")
    if any(s.gpu_hours for s in sizes):
        shares = [float(row[-1].rstrip("%")) for row in run_costs(results).rows]
        of = ""
        if shares:
            low, high = min(shares), max(shares)
            span = f"{low:.0f}%" if low == high else f"{low:.0f} to {high:.0f}%"
            of = f", {span} of it in these runs"
        lines.append(
            "Hours and the time to an accuracy are means, of the training alone: evaluation, "
            f"checkpoints and start-up come on top{of}."
        )
    found = caveats(results, unit, request_of(results, least))
    return lines + [_sentence(c.text) for c in found]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


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
        seconds = (size.train_samples or 0) / of_runs["images_per_s"].astype(float)
        training = seconds.sum() / len(own)
        evaluation = float(of_runs["eval_time_s"].sum()) / len(own)
        means = own[["startup_s", "total_time_s"]].astype(float).fillna(0).mean()
        startup, total = means["startup_s"], means["total_time_s"]
        rest = total - training - evaluation - startup
        if training <= 0 or rest < 0:  # epochs of other attempts, or made-up records
            continue
        parts = (total, training, evaluation, startup, rest)
        share = f"{total / training - 1:.0%}"
        rows.append([size.series, str(size.world_size), *(f"{v:.3g}" for v in parts), share])
    heads = ["series", "ranks", "whole run (s)", "training (s)", "evaluation (s)", "start-up (s)"]
    note = (
        "Means over the runs. The rest is checkpoints, records and the end of the processes. "
        "Node-hours and times to an accuracy are of the training alone."
    )
    return TextTable([*heads, "rest (s)", "beside training"], rows, 1, [note])


def project_table(
    results: Results, work: str, count: int, unit: str, forecasts: Sequence[Forecast] = ()
) -> TextTable:
    """The hours of a whole project at each size: count runs of an amount of work each.

    work: as 300e9 tokens, 1.2M images or 90 epochs. Raises UsageError for another text, and where
    no size measures that unit.
    """
    parts = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*([kMGBT]?)\s+(\w+)\s*", work)
    amount = float(parts[1]) * _SCALES[parts[2]] if parts else 0.0
    if not parts or amount <= 0:
        raise UsageError(f"--work {work!r}: an amount and its unit, as '300e9 tokens'")
    name = parts[3].rstrip("s")

    def add_row(series: str, size: Size, ranks: int, nodes: int, rates: Sequence[float]) -> None:
        """rates: of the training, and the ends of its interval."""
        seconds = amount / rates[0]
        if size.throughput_unit.partition("/")[0].rstrip("s") != name:
            if not name == size.time_of == EPOCH:
                return
            seconds *= size.time_amount or 0
        hours = count * seconds / 3600
        ends = [rounded(nodes * hours * rates[0] / rate) for rate in rates[:0:-1] if rate == rate]
        cells = [f"{seconds / 86400:.3g}", rounded(hours * ranks), rounded(nodes * hours)]
        rows.append([series, str(ranks), str(nodes), *cells, " to ".join(ends) or "-"])

    rows: list[list[str]] = []
    for size in results.sizes:
        if size.time_amount and size.mean_time_s and size.devices:
            mean = size.time_amount / size.mean_time_s
            ends = size.interval("throughput") or ()
            rates = [mean, *(mean * end / (size.throughput or 1) for end in ends)]
            add_row(size.series, size, size.devices, size.nodes or 1, rates)
    for one in forecasts if rows else ():
        for ranks in one.sizes:
            nodes = -(-ranks // (one.per_node or one.base.ranks_per_node or ranks))
            add_row(f"{one.series} (forecast)", one.base, ranks, nodes, one.at(ranks).rate)
    if not rows:
        measured = sorted({s.throughput_unit.partition("/")[0] for s in results.sizes})
        raise UsageError(f"--work {work!r}: the study measured {' and '.join(measured)}")
    hours = "GPU-hours" if unit == "GPUs" else "process-hours"
    heads = ["series", unit, "nodes", "days per run", hours, "node-hours", "node-hours at 95%"]
    note = (
        f"{counted(count, 'run')} of {amount:,.4g} {parts[3]} each, by the mean rate of the "
        "training; evaluation, checkpoints, start-up, failures and trials come on top."
    )
    return TextTable(heads, rows, 1, [note])


def forecast_rows(results: Results, forecasts: Sequence[Forecast], unit: str) -> TextTable:
    """The forecasts with their nodes and node-hours; what a reader must know is in the notes."""
    per = time_per(results.sizes)
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
        for row in records(forecast_table(results, forecasts))
    ]
    made = [f for f in forecasts if f.sizes]
    notes = [_sentence(f.caution) for f in made if f.caution]
    notes += [_sentence(remark) for f in forecasts for remark in f.remarks]
    notes += [
        f"Not measured: {SOURCES[law]}, by how well they predict the measured sizes, with the "
        "95 % prediction interval of one more run. A slower network level counts as possible."
        for law in dict.fromkeys(f.law for f in made)
    ]
    outliers = [(f.series, counted(f.left_out, "outlier")) for f in made if f.left_out]
    notes += [f"{series}: fitted without {left_out}." for series, left_out in outliers]
    notes += [f"No forecast: {why}." for f in forecasts for why in f.reasons]
    return TextTable(heads, rows, 1, notes)


def thread_lines(results: Results) -> list[str]:
    """A table of the ways in which the same cores were divided, and which is faster here.

    Empty where the runs on CPUs of one node did not divide the same cores in several ways. One way
    is called faster only where its slowest repeat beats the fastest of all others.
    """
    runs = results.runs.dropna(subset=["threads_used", "world_size", "images_per_s"])
    runs = runs[(runs["status"] == "ok") & (runs["device_type"] == "cpu") & (runs["nodes"] == 1)]
    cores = runs["world_size"] * runs["threads_used"]
    runs = runs[cores == cores.max()]
    if runs["threads_used"].nunique() < 2:
        return []
    rates = {
        f"{counted(n, 'process')} x {counted(threads, 'thread')} ({series})": list(own)
        for (n, threads, series), own in runs.groupby(["world_size", "threads_used", "series"])[
            "images_per_s"
        ]
    }
    best, *others = sorted(rates, key=lambda way: -median(rates[way]))
    if min(map(len, rates.values())) < 2:
        last = "one repeat alone does not say which is faster: --repeats 3"
    elif min(rates[best]) > max(rate for way in others for rate in rates[way]):
        last = f"{best} is faster than every other way in each repeat"
    else:
        last = "the repeats overlap: none is faster for certain"
    first = f"{counted(cores.max(), 'core')} as threads or processes, the fastest first:"
    rows = [f"  {way}: {rounded(median(rates[way]))} {IMAGES}" for way in (best, *others)]
    return [first, *rows, last]
