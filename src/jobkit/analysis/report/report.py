"""report.html: the results of a study in one file that needs no network.

    write_report(results, drawn.paths)    and the proposal's table: scaling.md, scaling.tex

The same logs give the same bytes: it contains no date, host name or path.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.draw import FIGURES
from jobkit.analysis.figures.style import shared_settings, unit
from jobkit.analysis.findings.causes import efficiency_table, size_breakdowns
from jobkit.analysis.findings.conditions import caveats
from jobkit.analysis.findings.forecast import LAW, Forecast, forecast_table, not_forecast
from jobkit.analysis.findings.forecast import forecasts as fitted
from jobkit.analysis.findings.verdict import LEAST, request_of, verdict
from jobkit.analysis.report.laws import LAW_NAMES, laws_table
from jobkit.analysis.report.many_runs import MOST_OF_A_KIND, listed
from jobkit.analysis.report.reproduce import commands, facts, study_file
from jobkit.analysis.report.tables import proposal_table, run_costs, thread_lines
from jobkit.analysis.tables.frames import records, save
from jobkit.analysis.tables.text import (
    TextTable,
    counted,
    rounded,
    say,
    say_accuracy,
    time_head,
    with_interval,
)

_TEMPLATE = "report.html.j2"


def write_report(
    results: Results,
    figures: Iterable[Path],
    forecasts: Sequence[Forecast] = (),
    least: float = LEAST,
    steps: TextTable | None = None,
    options: Sequence[str] = (),
) -> list[Path]:
    """Write the report and the proposal's table; return their paths.

    figures: those that were drawn; the SVG ones are shown. least: the parallel efficiency that
    the recommended size must have. steps: the table of step models, if any. options: the words
    that plot_results.py was given beside its forecast and efficiency.
    Raises UsageError where the study's folder cannot be written.
    """
    paths = results.output
    table = proposal_table(results, unit(results))
    texts = {
        paths.table_markdown: table.markdown(),
        paths.table_latex: table.latex(),
        paths.report: _html(results, table, figures, forecasts, least, steps, options),
    }
    for path, text in texts.items():
        save(path, text)
    return list(texts)


def _html(
    results: Results,
    table: TextTable,
    figures: Iterable[Path],
    forecasts: Sequence[Forecast],
    least: float,
    steps: TextTable | None,
    options: Sequence[str],
) -> str:
    own = [*options, *([] if least == LEAST else ["--min-efficiency", f"{least:g}"])]
    if wanted := sorted({n for f in forecasts for n in f.sizes}):
        own += ["--forecast", *map(str, wanted)]
    # On one node alone no measured size says it.
    if said := next((f.per_node for f in forecasts if f.nodes == 1 and f.sizes), None):
        own += ["--ranks-per-node", str(said)]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        study=results.name,
        under=" | ".join(shared_settings(results, "median")),
        verdict=verdict(results, unit(results), least),
        proposal=table,
        efficiencies=efficiency_table(size_breakdowns(results), unit(results)),
        costs=run_costs(results),
        care=_care(results, least),
        figures=[_figure(path) for path in figures if path.suffix == ".svg"],
        forecast=_forecast(results, forecasts),
        laws=laws_table(fitted(results)),
        steps=steps,
        runs=[_run(row) for row in records(listed(results))],
        of_runs=len(results.runs),
        most=MOST_OF_A_KIND,
        facts=facts(results),
        study_file=study_file(results),
        commands=commands(results, own),
    )


def _figure(path: Path) -> dict[str, str]:
    """A figure as a data URI: as an image of its own, its ids meet no other's."""
    content = path.read_bytes()
    captions = {one.name: one.caption for one in FIGURES}
    width = re.search(rb'<svg[^>]* width="([\d.]+)pt"', content)
    return {
        "source": f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}",
        "name": path.stem.replace("_", " "),
        "text": captions.get(path.stem, ""),
        "inches": f"{float(width[1]) / 72:.3g}" if width else "6.4",
    }


def _care(results: Results, least: float) -> list[str]:
    """The caveats: what limits the trust in the numbers, problems of the logs, warnings."""
    found = caveats(results, unit(results), request_of(results, least))
    lines = [f"{c.text[0].upper()}{c.text[1:]}." for c in found] + results.warnings()
    for row in records(results.scaling):
        where = f"{row['series']} at {counted(row['world_size'], 'rank')}"
        if pd.notna(row["outliers"]):
            lines.append(f"{where}: outlier among the repeats: {row['outliers']}")
        if pd.notna(row["not_distinguishable_from"]) and pd.notna(row["spread_from"]):
            lines = lines + _alike(where, str(row["not_distinguishable_from"]), lines)
    if divided := thread_lines(results):
        lines.append("; ".join(line.strip() for line in divided))
    texts = results.runs["warnings_text"].dropna().str.split(" | ", regex=False).explode()
    counts = texts.value_counts(sort=False).sort_index()
    return lines + [f"warning of {counted(n, 'run')}: {text}" for text, n in counts.items()]


def _alike(where: str, names: str, listed: Sequence[str]) -> list[str]:
    """What a size is not told apart from, without what was listed the other way round."""
    series, _, size = where.rpartition(" at ")
    end = "not distinguishable from"
    pairs = [(f"{name} at {size}", f"{where}: {end} {name}") for name in names.split("; ")]
    return [line for other, line in pairs if f"{other}: {end} {series}" not in listed]


def _forecast(results: Results, forecasts: Sequence[Forecast]) -> TextTable:
    table = forecast_table(results, forecasts)
    heads = ["series", "law", unit(results), "times the largest measured size"]
    heads.append(f"forecast {time_head(table)}")
    heads += ["forecast speed-up", "forecast efficiency"]
    rows = [
        [
            row["series"],
            LAW_NAMES[row["law"]],
            say(row["world_size"]),
            say(row["times_beyond"], "{:.3g}"),
            with_interval(row, "time", "{:.3g}", "_s"),
            with_interval(row, "speed_up", "{:.3g}"),
            with_interval(row, "efficiency", "{:.0%}"),
        ]
        for row in records(table)
    ]
    note = (
        "Not measured: laws averaged by how well they predict the measured sizes, with the 95 % "
        "prediction interval of one more run. A slower network level beyond the measured sizes "
        "counts as possible."
    )
    notes = [f"{f.caution[0].upper()}{f.caution[1:]}." for f in forecasts if f.sizes and f.caution]
    notes += [note] * (LAW in set(table["law"]))
    notes += [
        f"Not measured: {f.series} on {n} ranks by the step model with the measured links, "
        f"{f.at(n).interval}."
        for f in forecasts
        for n in f.by_steps
    ]
    notes += [f"No forecast: {why}." for f in forecasts for why in not_forecast(f)]
    return TextTable(heads, rows, 2, notes)


def _run(row: dict[str, Any]) -> dict[str, Any]:
    """A run as the report has it; a dash for a number that is not known."""
    evidence = row["evidence"]
    shown = "" if pd.isna(evidence) else f"{row['evidence_file']}: {evidence}"
    return {
        "run_id": row["run_id"],
        "status": row["status"],
        "why": "" if pd.isna(row["reason"]) else row["reason"],
        "evidence": shown,
        "cells": [
            say(row["time_per_epoch_s"], "{:.4g}"),
            say(row["throughput"] if pd.isna(row["throughput"]) else rounded(row["throughput"])),
            say(row["throughput_unit"]),
            say(row["peak_memory_mib"], "{:,.0f}"),
            say_accuracy(row["val_accuracy"]),
        ],
    }
