"""report.html: the results of a study in one file that needs no network.

    write_report(results, draw(results))    and the proposal's table: scaling.md, scaling.tex

The same logs give the same bytes: it contains no date, host name or path.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.draw import FIGURES
from jobkit.analysis.figures.style import shared_settings, unit
from jobkit.analysis.findings.forecast import Forecast
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.report.tables import forecast_rows, proposal_table, run_costs
from jobkit.analysis.scaling import MIN_EFFICIENCY
from jobkit.analysis.tables.frames import records, save
from jobkit.analysis.tables.text import TextTable, counted, say, some
from jobkit.spec.runspec import SETTINGS, RunSpec
from jobkit.spec.study import read_run_spec, run_folders

MAX_LISTED = 200  # runs
_SHOWN = 6  # different values of a column
_SHOWN_WARNINGS = 3  # in the proposal
_VERSIONS = (
    *("device", "device_type", "backend", "torch_version", "python_version", "cuda_version"),
    *("hip_version", "nccl_version", "cudnn_version", "cudnn_benchmark", "driver_version"),
    *("threads_used", "parameters", "train_samples", "test_samples", "node_list", "git_commit"),
)
_IN_TABLES = ("nodes", "ranks_per_node", "repeat", "epochs", "batch_size_per_rank")


def write_report(
    results: Results,
    figures: Iterable[Path],
    forecasts: Sequence[Forecast] = (),
    reasons: Sequence[str] = (),
    least: float = MIN_EFFICIENCY,
    project: TextTable | None = None,
) -> list[Path]:
    """Write the report and the proposal's table; return their paths.

    figures: those that were drawn; the SVG ones are shown. reasons: why others have no forecast.
    least: the parallel efficiency that the recommended size must have. project: the hours of a
    whole project, if they were asked for. Raises UsageError where the study's folder cannot be
    written.
    """
    paths, of = results.output, unit(results)
    proposal = proposal_table(results, of, least)
    options: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, **options)
    care = results.warnings()  # the caveats are notes of the table
    texts = results.runs["warnings_text"].dropna().str.split(" | ", regex=False).explode()
    counts = texts.value_counts(sort=False).sort_index()
    care += [f"warning of {counted(n, 'run')}: {text}" for text, n in counts.items()]
    captions = {figure.name: figure.caption for figure in FIGURES}
    html = environment.get_template("report.html.j2").render(
        study=results.name,
        under=" | ".join(shared_settings(results)),
        verdict=verdict(results, of, least),
        proposal=proposal,
        project=project,
        costs=run_costs(results),
        care=care,
        # As images of their own, their ids meet no other's.
        figures=[
            (base64.b64encode(path.read_bytes()).decode(), path.stem, captions[path.stem])
            for path in figures
            if path.suffix == ".svg"
        ],
        forecast=forecast_rows(results, forecasts, reasons, of),
        odd=odd_runs(results),
        facts=facts(results),
    )
    if doubts := results.warnings():
        text = f"Warnings of jobkit: {some(doubts, _SHOWN_WARNINGS)}."
        proposal = replace(proposal, notes=[*proposal.notes, text])
    latex = proposal.latex() + (project.latex() if project else "")
    markdown = proposal.markdown() + (f"\n{project.markdown()}" if project else "")
    written = {paths.table_markdown: markdown, paths.table_latex: latex, paths.report: html}
    for path, text in written.items():
        save(path, text)
    return list(written)


def odd_runs(results: Results) -> TextTable:
    """The runs that are not ok, and the outliers; results.csv has every run."""
    outliers = {name for text in results.scaling["outliers"].dropna() for name in text.split(", ")}
    odd = (results.runs["status"] != "ok") | results.runs["run_id"].isin(outliers)
    names = ["run_id", "status", "reason", "evidence_file", "evidence"]
    rows = [list(map(say, row.values())) for row in records(results.runs.loc[odd, names])]
    left_out = len(rows) - MAX_LISTED
    notes = [f"{left_out} more are in results.csv."] * (left_out > 0)
    return TextTable(["run", "status", "reason", "file", "evidence"], rows[:MAX_LISTED], 5, notes)


def facts(results: Results) -> list[tuple[str, str]]:
    """Settings and versions with their values; where runs differ, the values and their counts.

    What no column has is the same in all runs, so that one spec.json says it: what is not at its
    default there, and the parameters of a command.
    """
    run_ids = set(results.runs["run_id"])
    folders = (f for f in run_folders(results.folder) if f.name in run_ids)
    spec = next((spec for f in folders if (spec := read_run_spec(f))), None)
    parameters = spec.parameters if spec else {}
    shared = {**spec.differences(), **parameters} if spec else {}
    settings = [n for n in ("epochs_planned", *SETTINGS, *parameters) if n not in _IN_TABLES]
    lines = []
    for name in dict.fromkeys((*_VERSIONS, *settings)):
        column = results.runs.get(name, pd.Series(shared.get(name), dtype=object))
        counts = column.dropna().value_counts(sort=False)
        values = sorted(f"{value} ({counted(count, 'run')})" for value, count in counts.items())
        text = f"{counts.index[0]}" if len(values) == 1 else some(values, _SHOWN)
        lines += [(name.replace("_", " "), text)] if text else []
    return lines + [("other settings", "at their default")] * isinstance(spec, RunSpec)
