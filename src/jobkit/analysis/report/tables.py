"""The tables of the report: scaling for a proposal, a whole project, what runs cost beside."""

import re
from collections.abc import Sequence

from jobkit.analysis.collect.results import Results
from jobkit.analysis.collect.rows import WALL_TIME
from jobkit.analysis.collect.steps import WITH_START
from jobkit.analysis.findings.conditions import caveats
from jobkit.analysis.findings.forecast import Forecast, forecast_table
from jobkit.analysis.findings.verdict import percent, request_of, share_of
from jobkit.analysis.scaling import MIN_EFFICIENCY
from jobkit.analysis.scaling.scaling import OWN_BASE, SERIAL_BASE
from jobkit.analysis.scaling.sizes import EPOCH, IMAGES, Size, time_of
from jobkit.analysis.tables import text
from jobkit.analysis.tables.frames import Row, records
from jobkit.analysis.tables.text import NONE, TextTable, counted, rounded, say, sentence
from jobkit.errors import UsageError


def proposal_table(
    results: Results, unit: str, least: float = MIN_EFFICIENCY, *, terminal: bool = False
) -> TextTable:
    """The scaling of a study, a row for each series and size, with its base and its caveats.

    unit: GPUs, or ranks. What is the same in all rows is a note, so that the table fits
    a page. terminal: memory, accuracy and rate in place of costs and intervals.
    """
    sizes, per = results.sizes, f"per {time_of(results.sizes)}"

    def cells(name: str, form: str) -> list[str]:
        return [say(getattr(s, name), form) for s in sizes]

    shares = [percent(s.efficiency, least) if terminal else share_of(s, least) for s in sizes]
    scalings = {s.scaling or NONE for s in sizes}
    start_up = ", start-up included" * (per == "per run")  # nothing but its wall time is known
    columns = {
        "series": [s.series for s in sizes],
        "scaling": [s.scaling or NONE for s in sizes] if len(scalings) > 1 else [],
        unit: [say(s.devices or s.world_size) for s in sizes],
        "nodes": cells("nodes", "{}") if any((s.nodes or 1) > 1 for s in sizes) else [],
        "runs ok": [f"{s.runs_ok} of {s.runs_planned}" for s in sizes],
        f"time {per}{start_up} (s)": cells("time_s", "{:.4g}"),
        "speed-up": cells("speed_up", "{:.2f}"),
        "parallel efficiency": shares,
        "GPU busy": cells("gpu_busy", "{:.0%}"),
    }
    if terminal:
        columns["peak memory (MiB)"] = cells("peak_memory_mib", "{:,.0f}")
        columns["val. accuracy"] = [text.say_accuracy(s.val_accuracy) for s in sizes]
        if any(s.throughput_unit != IMAGES for s in sizes):
            rates = ((s.throughput, s.throughput_unit) for s in sizes)
            columns["throughput"] = [f"{rounded(x)} {of}" if x else NONE for x, of in rates]
    else:
        speed_ups = ((s.speed_up, s.interval("speed_up")) for s in sizes)
        columns["speed-up"] = [text.with_interval(x, ends, "{:.2f}") for x, ends in speed_ups]
        columns[f"{unit[:-1]}-hours {per}"] = cells("gpu_hours", "{:.3g}")
        columns[f"node-hours {per}"] = cells("node_hours", "{:.3g}")
    shown = {
        head: column
        for head, column in columns.items()
        if {*column} - {NONE} or head.startswith("time per")
    }
    rows = [list(row) for row in zip(*shown.values(), strict=True)]
    return TextTable(list(shown), rows, 1 + ("scaling" in shown), _notes(results, unit, least))


def _notes(results: Results, unit: str, least: float) -> list[str]:
    """The table's notes: the base, the intervals, what the costs leave out, and all caveats."""
    sizes, kinds = results.sizes, {s.scaling for s in results.sizes}
    kind = f"{str(sizes[0].scaling).capitalize()} scaling. " * (len(kinds) == 1)
    if kinds == {None}:
        fix = "repeat run, or collect --logs, with --scaling; what is ok does not run again"
        kind = f"Strong or weak scaling is not known: {fix}. "
    bases = [s.baseline.rsplit(": ", 1) for s in sizes if s.baseline]
    rules = [*dict.fromkeys(f"{rule}, {base}" for base, rule in bases if rule == SERIAL_BASE)]
    if not rules or len({base for base, _ in bases}) > 1:
        rules.append(OWN_BASE)
    base = f"Speed-up and parallel efficiency are relative to {'; else to '.join(rules)}."
    lines = [kind + (base if bases else "No size is compared with another.")]
    if any(s.spread_from for s in sizes):
        of = "the median over runs, from the spread of the repeats of all sizes by Student's t."
        lines.append(f"In brackets: 95% interval of {of}")
    if any(s.gpu_hours for s in sizes):
        lines.append(f"Hours are means: {_beside(results)}.")
    if any(s.nodes is None and s.throughput for s in sizes):
        lines.append("Nodes are not known: collect with --gpus-per-node for node-hours.")
    request, found = request_of(results, least), dict[str, list[str]]()
    of_series = {s.series: s for s in sizes if s.efficiency}  # the largest size of each
    of_series |= {request.series: request} if request else {}
    for name, size in of_series.items():
        for caveat in caveats(results, unit, size):
            found.setdefault(caveat.text, []).append(name)
    for said, names in (found or {c.text: [] for c in caveats(results, unit)}).items():
        some = 0 < len(names) < len(of_series) and not any(name in said for name in names)
        lines.append(f"{', '.join(names)}: {said}." if some else sentence(said))
    return lines


def _beside(results: Results) -> str:
    """What comes on top of the time of the training, as its rate was measured."""
    sources = {*results.runs["throughput_source"].dropna()}
    on_top = "start-up, evaluation and checkpoints outside of the steps come on top"
    known = (row[-1] for row in run_costs(results).rows if row[-1] != NONE)
    if shares := sorted(known, key=lambda x: float(x[:-1])):
        span = " to ".join(dict.fromkeys([shares[0], shares[-1]])).replace("% to", " to")
        on_top += f", {span} of the training in these runs"
    patterns = sorted(source for source in sources if source.startswith("pattern "))
    parts = [f"rates are of {'; '.join(patterns)}"] * bool(patterns)
    parts += [on_top] * any(WITH_START not in source for source in sources)
    if WALL_TIME not in sources:
        return "; ".join(parts) or on_top
    more = f", where nothing measured the steps; else {'; '.join(parts)}" if parts else ""
    return f"of whole runs, start-up included{more}"


def run_costs(results: Results) -> TextTable:
    """What a whole run takes beside its training: means over the runs of one attempt."""
    runs = results.runs.dropna(subset=["total_time_s", "train_samples"])
    runs = runs[(runs["status"] == "ok") & (runs["attempts"].fillna(1) == 1)]
    epochs = results.epochs[results.epochs["images_per_s"].gt(0).fillna(False)]
    rows = []
    for size in results.sizes:
        own = runs[runs["run_id"].isin(size.ok_runs)]
        of_runs = epochs[epochs["run_id"].isin(own["run_id"])]
        if own.empty or of_runs.empty or not size.train_samples or size.throughput_unit != IMAGES:
            continue
        seconds = size.train_samples / of_runs["images_per_s"].astype(float)
        training = seconds.sum() / len(own)
        evaluation = float(of_runs["eval_time_s"].sum()) / len(own)
        startup, total = own[["startup_s", "total_time_s"]].astype(float).fillna(0).mean()
        rest = total - training - evaluation - startup
        cells = [f"{seconds:.3g}" for seconds in (total, training, evaluation, startup)]
        # By two clocks the parts may sum to more than the whole.
        cells += [f"{rest:.3g}" if rest >= 0 else NONE]
        cells += [f"{total / training - 1:.0%}" if total >= training else NONE]
        rows.append([size.series, str(size.world_size), *cells])
    heads = ["series", "ranks", "whole run (s)", "training (s)", "evaluation (s)", "start-up (s)"]
    note = "Means over the runs. The rest is checkpoints, records and the end of the processes. "
    note += "Node-hours and times to an accuracy are of the training alone."
    if again := int(results.runs.loc[results.runs["status"] == "ok", "attempts"].gt(1).sum()):
        note += f" Left out because of restarts: {counted(again, 'run')}."
    return TextTable([*heads, "rest (s)", "beside training"], rows, 1, [note])


def project_table(
    results: Results,
    work: str,
    count: int,
    unit: str,
    forecasts: Sequence[Forecast] = (),
    least: float = MIN_EFFICIENCY,
) -> TextTable:
    """The hours of a whole project at each size: count runs of an amount of work each.

    work: as 300e9 tokens or 90 epochs. least: see proposal_table. Raises UsageError for another
    text, and where no size measures that unit.
    """
    parts = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s+([\w-]+)\s*", work)
    amount = float(parts[1]) if parts else 0.0
    if not parts or amount <= 0:
        raise UsageError(f"--work {work!r}: an amount and its unit, as '300e9 tokens'")
    name = parts[2].rstrip("s")
    # Series, a measured size, ranks, nodes, and the rate of the training with its ends.
    lines: list[tuple[str, Size, int, int | None, Sequence[float]]] = []
    for size in results.sizes:
        if size.time_amount and size.mean_time_s and size.devices:
            mean = size.time_amount / size.mean_time_s
            ends = size.interval("throughput") or ()
            means = [mean, *(mean * end / (size.throughput or 1) for end in ends)]
            lines.append((size.series, size, size.devices, size.nodes, means))
    lines += [
        (f"{f.base.series} (forecast)", f.base, n, nodes, f.prediction.rate(n))
        for f in forecasts
        for n, nodes in f.sizes.items()
    ]
    rows: list[list[str]] = []
    for series, size, ranks, nodes, rates in lines:
        seconds = amount / rates[0]
        if size.throughput_unit.partition("/")[0].rstrip("s") != name:
            if not name == size.time_of == EPOCH:
                continue
            seconds *= size.time_amount or 0
        hours = count * seconds / 3600
        cells = [series, str(ranks), say(nodes), f"{seconds / 86400:.3g}", rounded(hours * ranks)]
        span = [rounded((nodes or 0) * hours * rates[0] / x) for x in rates[:0:-1] if x > 0]
        cells += [rounded(nodes * hours), " to ".join(span) or NONE] if nodes else [NONE, NONE]
        rows.append(cells)
    if not rows:
        measured = sorted({s.throughput_unit.partition("/")[0] for s in results.sizes})
        units = " and ".join(measured)
        raise UsageError(f"--work {work!r}: the study measured {units}, as '1000 {measured[0]}'")
    heads = ["series", unit, "nodes", "days per run", f"{unit[:-1]}-hours", "node-hours"]
    note = f"{counted(count, 'run')} of {work.strip()} each, by the mean rate: {_beside(results)}. "
    note += "Failures and trials come on top."
    if request_of(results, least) is None:
        note += " The verdict requests no size: do not use these yet."
    return TextTable([*heads, "node-hours at 95%"], rows, 1, [note])


def forecast_rows(
    results: Results, forecasts: Sequence[Forecast], reasons: Sequence[str], unit: str
) -> TextTable:
    """The forecasts with their nodes and node-hours; what a reader must know is in the notes."""
    per, table = f"per {time_of(results.sizes)}", forecast_table(results, forecasts)

    def cell(row: Row, name: str, form: str, end: str = "") -> str:
        ends = row[f"{name}_low{end}"], row[f"{name}_high{end}"]
        return text.with_interval(row[f"{name}{end}"], ends, form)

    heads = ["series", unit, "nodes", "times the largest measured size", f"time {per} (s)"]
    heads += ["speed-up", "parallel efficiency", f"node-hours {per}"]
    rows = []
    for row in records(table):
        cells = [str(row["series"]), say(row["world_size"]), say(row["nodes"])]
        cells += [say(row["times_beyond"], "{:.3g}"), cell(row, "time", "{:.3g}", "_s")]
        cells += [cell(row, "speed_up", "{:.3g}"), cell(row, "efficiency", "{:.0%}")]
        rows.append([*cells, cell(row, "node_hours", "{:.3g}")])
    notes = [sentence(note) for f in forecasts for note in f.notes]
    notes += [
        f"Not measured: average of laws{' with the measured links' * (law != 'average')}, by how "
        "well they predict the measured sizes, with the 95 % prediction interval of one more run."
        for law in table["law"].unique()
    ]
    notes += [f"No forecast: {why}." for why in reasons]
    return TextTable(heads, rows, 1, notes)
