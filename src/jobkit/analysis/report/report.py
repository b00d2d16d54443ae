"""report.html: the results of a study in one file that needs no network.

    write_report(results, drawn.paths)    and the proposal's table: scaling.md, scaling.tex

The same logs give the same bytes: it contains no date, host name or path.
"""

import base64
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jobkit.analysis.collect.results import Results
from jobkit.analysis.figures.draw import FIGURES
from jobkit.analysis.figures.style import shared_settings, unit
from jobkit.analysis.findings.causes import efficiency_table, size_breakdowns
from jobkit.analysis.findings.forecast import Forecast
from jobkit.analysis.findings.verdict import LEAST, verdict
from jobkit.analysis.report.tables import (
    forecast_rows,
    proposal_table,
    run_costs,
    thread_lines,
)
from jobkit.analysis.tables.frames import records, save
from jobkit.analysis.tables.text import TextTable, counted, rounded, say, say_accuracy
from jobkit.errors import UsageError
from jobkit.files import open_regular
from jobkit.paths import read_json
from jobkit.spec.runspec import SETTINGS
from jobkit.spec.study import Study

_TEMPLATE = "report.html.j2"
MAX_LISTED = 200  # runs of a study that are all listed
MAX_OF_A_KIND = 20
_VERSIONS = (
    "device",
    "device_type",
    "backend",
    "torch_version",
    "python_version",
    "cuda_version",
    "hip_version",
    "nccl_version",
    "cudnn_version",
    "cudnn_benchmark",
    "driver_version",
    "threads_used",
    "parameters",
    "train_samples",
    "test_samples",
    "node_list",
    "git_commit",
)
_WIDTH = re.compile(rb'<svg[^>]* width="([\d.]+)pt"')
_MAX_SVG = 1 << 26  # bytes of a figure
_SHOWN = 6  # different values of a column
_IN_TABLES = ("nodes", "ranks_per_node", "repeat", "epochs", "batch_size_per_rank")


def write_report(
    results: Results,
    figures: Iterable[Path],
    forecasts: Sequence[Forecast] = (),
    least: float = LEAST,
    project: TextTable | None = None,
    options: Sequence[str] = (),
) -> list[Path]:
    """Write the report and the proposal's table; return their paths.

    figures: those that were drawn; the SVG ones are shown. least: the parallel efficiency that
    the recommended size must have. project: the hours of a whole project, if they were asked for.
    options: the words that plot_results.py was given. Raises UsageError where the study's folder
    cannot be written.
    """
    paths, of = results.output, unit(results)
    proposal = proposal_table(results, of, least)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    care = results.warnings()  # the caveats are notes of the table
    if divided := thread_lines(results):
        care.append("; ".join(line.strip() for line in divided))
    texts = results.runs["warnings_text"].dropna().str.split(" | ", regex=False).explode()
    counts = texts.value_counts(sort=False).sort_index()
    care += [f"warning of {counted(n, 'run')}: {text}" for text, n in counts.items()]
    html = environment.get_template(_TEMPLATE).render(
        study=results.name,
        under=" | ".join(shared_settings(results, "median")),
        verdict=verdict(results, of, least),
        proposal=proposal,
        project=project,
        efficiencies=efficiency_table(size_breakdowns(results), of),
        costs=run_costs(results),
        care=care,
        figures=[_figure(path) for path in figures if path.suffix == ".svg"],
        forecast=forecast_rows(results, forecasts, of),
        runs=[_run(row) for row in records(listed(results))],
        of_runs=len(results.runs),
        most=MAX_OF_A_KIND,
        facts=facts(results),
        study_file=study_file(results),
        commands=commands(results, options),
    )
    latex = proposal.latex() + (project.latex() if project else "")
    markdown = proposal.markdown() + (f"\n{project.markdown()}" if project else "")
    written = {paths.table_markdown: markdown, paths.table_latex: latex, paths.report: html}
    for path, text in written.items():
        save(path, text)
    return list(written)


def _figure(path: Path) -> dict[str, str]:
    """A figure as a data URI: as an image of its own, its ids meet no other's."""
    with open_regular(path, _MAX_SVG, follow=False) as file:
        content = file.read()
    captions = {figure.name: figure.caption for figure in FIGURES}
    width = _WIDTH.search(content)
    return {
        "source": f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}",
        "name": path.stem.replace("_", " "),
        "text": captions.get(path.stem, ""),
        "inches": f"{float(width[1]) / 72:.3g}" if width else "6.4",
    }


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


def listed(results: Results) -> pd.DataFrame:
    """All runs of a study; of many, some of those not ok and outliers, the slowest and fastest.

    Slow and fast are beside the median rate of the size.
    """
    runs = results.runs
    if len(runs) <= MAX_LISTED:
        return runs
    size = ["series", "nodes", "world_size", "throughput_unit"]
    medians = runs.groupby(size, dropna=False)["throughput"].transform("median")
    beside = (runs["throughput"] / medians).dropna().sort_values(kind="stable")
    odd = {name for text in results.scaling["outliers"].dropna() for name in text.split(", ")}
    kinds = (
        runs.index[runs["status"] != "ok"][:MAX_OF_A_KIND],
        runs.index[runs["run_id"].isin(odd)][:MAX_OF_A_KIND],
        beside.index[:MAX_OF_A_KIND],
        beside.index[-MAX_OF_A_KIND:],
    )
    return runs.loc[sorted({row for kind in kinds for row in kind})]


def study_file(results: Results) -> str:
    """The study as a TOML file that plans the same runs; empty where there is no plan."""
    if not (study := _planned_study(results)):
        return ""
    plain = {k: v for k, v in study.items() if not isinstance(v, Mapping)}
    tables = {k: v for k, v in study.items() if isinstance(v, Mapping) and v}
    text = [*_not_planned(results, study), *_lines(plain)]
    for name, table in tables.items():
        text += ["", f"[{name}]", *_lines(table)]
    return "\n".join(text)


def _planned_study(results: Results) -> dict[str, Any]:
    """The study in the plan; empty where there is none."""
    study = (read_json(results.paths.plan) or {}).get("study")
    return study if isinstance(study, dict) else {}


def _not_planned(results: Results, study: Mapping[str, Any]) -> list[str]:
    """A comment on the runs that calls with other values planned before, under the same name."""
    try:
        planned = Study(**study).expand().runs
    except (UsageError, TypeError):  # of an older version
        return []
    others, total = sum(r not in planned for r in results.runs["run_id"]), len(results.runs)
    if others in (0, total):  # all: of an older version, which had other defaults
        return []
    of = counted(total, "run")
    return [f"# Without {others} of the {of}, which calls with other values planned before."]


def commands(results: Results, options: Sequence[str] = ()) -> str:
    """The commands that run the study again and make this report; options: of plot_results.py."""
    name = shlex.quote(results.name)
    lines = [f"python run_benchmarks.py --study {name}.toml"] if _planned_study(results) else []
    lines.append(f"python collect_results.py {name}")
    return "\n".join([*lines, " ".join(["python plot_results.py", name, *options])])


def facts(results: Results) -> list[tuple[str, str]]:
    """Settings and versions with their values; where runs differ, the values and their counts."""
    settings = ("epochs_planned", *SETTINGS)
    names = [n for n in settings if n in results.runs and n not in _IN_TABLES]
    found = [(name, _values(results.runs[name])) for name in dict.fromkeys((*_VERSIONS, *names))]
    return [(name.replace("_", " "), text) for name, text in found if text]


def _values(column: "pd.Series[Any]") -> str:
    counts = column.dropna().value_counts(sort=False)
    if len(counts) == 1:
        return f"{counts.index[0]}"
    shown = sorted(f"{value} ({counted(count, 'run')})" for value, count in counts.items())
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _lines(table: Mapping[str, Any]) -> list[str]:
    """Keys and values as TOML has them."""
    return [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: Any) -> str:
    """A value in TOML's words, which JSON's are but for numbers that are not finite."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
