"""report.html: one file that says what a study found, offline and without a request.

    write_report(results, drawn.paths)    and the proposal's table: scaling.md, scaling.tex

The same logs give the same bytes: nothing of the day, the machine or its paths is in it.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.draw import CAPTIONS
from jobkit.analysis.figures.drawing import unit
from jobkit.analysis.figures.subtitle import subtitle
from jobkit.analysis.findings.breakdowns import broken_sizes, efficiency_table
from jobkit.analysis.findings.forecast import Forecast, forecast_table
from jobkit.analysis.findings.forecast import forecasts as fitted
from jobkit.analysis.findings.verdict import LEAST, verdict
from jobkit.analysis.report.proposal import proposal_table
from jobkit.analysis.report.reproduce import commands, facts, study_file
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.products import save
from jobkit.analysis.tables.text import TextTable, say, so_many, with_interval

_TEMPLATE = "report.html.j2"
_LAW_NAMES = {
    "amdahl": "Amdahl",
    "usl": "Universal Scalability Law",
    "gustafson": "Gustafson",
}


def write_report(
    results: Results,
    figures: Iterable[Path],
    forecasts: Sequence[Forecast] = (),
    least: float = LEAST,
    steps: TextTable | None = None,
) -> list[Path]:
    """Write the report and the proposal's table; return their paths.

    figures: those that were drawn; the SVG ones are shown. least: the parallel efficiency below
    which the verdict says that more ranks do not pay. steps: the table of step models, if any.
    Raises UsageError where the study's folder cannot be written.
    """
    paths = results.paths
    table = proposal_table(results.scaling, unit(results))
    texts = {
        paths.table_markdown: table.markdown(),
        paths.table_latex: table.latex(),
        paths.report: _html(results, table, figures, forecasts, least, steps),
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
) -> str:
    wanted = sorted({n for f in forecasts for n in f.sizes})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        study=results.name,
        under=subtitle(results, "median").replace("\n", " | "),
        verdict=verdict(results, unit(results), least, forecasts),
        proposal=table,
        efficiencies=efficiency_table(broken_sizes(results), unit(results)),
        care=_care(results),
        figures=[_figure(path) for path in figures if path.suffix == ".svg"],
        forecast=_forecast(results, forecasts),
        laws=_laws(fitted(results)),
        steps=steps,
        runs=[_run(row) for row in records(results.runs)],
        facts=facts(results),
        study_file=study_file(results),
        commands=commands(results, wanted),
    )


def _figure(path: Path) -> dict[str, str]:
    """A figure as a data URI: as an image of its own, its ids meet no other's."""
    content = path.read_bytes()
    width = re.search(rb'<svg[^>]* width="([\d.]+)pt"', content)
    return {
        "source": f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}",
        "name": path.stem.replace("_", " "),
        "text": CAPTIONS.get(path.stem, ""),
        "inches": f"{float(width[1]) / 72:.3g}" if width else "6.4",
    }


def _care(results: Results) -> list[str]:
    """What could mislead: faults of the logs, odd runs, what is not told apart, warnings."""
    lines = results.warnings()
    for row in records(results.scaling):
        where = f"{row['series']} at {so_many(row['world_size'], 'ranks')}"
        if pd.notna(row["outliers"]):
            lines.append(f"{where}: the rate of {row['outliers']} does not fit the other repeats")
        if pd.notna(row["not_distinguishable_from"]):
            lines += _twins(where, str(row["not_distinguishable_from"]), lines)
    texts = results.runs["warnings_text"].dropna().str.split(" | ", regex=False).explode()
    counts = texts.value_counts(sort=False).sort_index()
    return lines + [f"{n} run{'s' * (n > 1)} warned: {text}" for text, n in counts.items()]


def _twins(where: str, names: str, said: Sequence[str]) -> list[str]:
    """What a size is not told from, where that was not said the other way round."""
    series, _, size = where.partition(" at ")
    pairs = [
        (f"{name} at {size}", f"{where}: not distinguishable from {name}")
        for name in names.split("; ")
    ]
    return [
        line for other, line in pairs if f"{other}: not distinguishable from {series}" not in said
    ]


def _forecast(results: Results, forecasts: Sequence[Forecast]) -> TextTable:
    heads = ["series", "law", unit(results), "times beyond", "forecast time per epoch (s)"]
    heads += ["forecast speed-up", "forecast efficiency"]
    rows = [
        [
            row["series"],
            _LAW_NAMES[row["law"]],
            say(row["world_size"]),
            say(row["times_beyond"], "{:.3g}"),
            with_interval(row, "time_per_epoch", "{:.3g}", "_s"),
            with_interval(row, "speed_up", "{:.3g}"),
            with_interval(row, "efficiency", "{:.0%}"),
        ]
        for row in records(forecast_table(results, forecasts))
    ]
    note = (
        "Not measured: the fitted law, with its 95 % prediction interval. It holds as long as "
        "nothing new slows the run down; another network between nodes is such a thing."
    )
    return TextTable(heads, rows, 2, [note])


def _laws(found: Sequence[Forecast]) -> TextTable:
    """The fitted unknowns of every series, with their intervals and how well the law fits."""
    heads = ["series", "law", "unknown", "value", "95 % interval", "R\N{SUPERSCRIPT TWO}"]
    rows = [
        [
            one.series,
            _LAW_NAMES[fit.law] + (" (used to forecast)" if fit is one.fits[0] else ""),
            estimate.name.replace("_", " "),
            f"{estimate.value:.4f}",
            f"{estimate.low:.4f} to {estimate.high:.4f}",
            f"{fit.r_squared:.4f}",
            f"{fit.worst:.1%}",
        ]
        for one in found
        for fit in one.fits
        for estimate in fit.estimates
    ]
    notes = [f"No fit of {one.refused}." for one in found if one.refused]
    left_out = [one for one in found if one.left_out and one.fits]
    notes += [f"{one.series}: fitted without {one.left_out} outlying run(s)." for one in left_out]
    if any(float(row[3]) < 0 for row in rows):
        notes.append("A value below 0 is a speed-up beyond ideal at some size.")
    return TextTable([*heads, "largest miss"], rows, 3, notes)


def _run(row: dict[str, Any]) -> dict[str, Any]:
    """A run as the report shows it: numbers only where it says them."""
    evidence = row["evidence"]
    proof = "" if pd.isna(evidence) else f"{row['evidence_file']}: {evidence}"
    return {
        "run_id": row["run_id"],
        "status": row["status"],
        "why": "" if pd.isna(row["reason"]) else row["reason"],
        "evidence": proof,
        "cells": [
            say(row["time_per_epoch_s"], "{:.4g}"),
            say(row["images_per_s"], "{:,.0f}"),
            say(row["peak_memory_mib"], "{:,.0f}"),
            say(row["val_accuracy"], "{:.1%}"),
        ],
    }
