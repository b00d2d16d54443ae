"""The step model of a study: what each series moves, how well held-out sizes are foretold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.step_fit import HeldOut, Point, StepModel, fit_steps, held_out
from jobkit.analysis.findings.step_links import Links, Message, communication_s
from jobkit.analysis.scaling.sizes import Size, sizes
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import TextTable
from jobkit.errors import UsageError

_MIB = 2**20
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class SeriesSteps:
    """The step model of one series; refused says why there is none."""

    series: str
    points: tuple[Point, ...] = ()
    model: StepModel | None = None  # fitted to all sizes
    tests: tuple[HeldOut, ...] = ()
    refused: str = ""


def step_models(results: Results, links: Links, algorithm: str = "ring") -> list[SeriesSteps]:
    """The step model of every series with a size that was measured.

    A size that lies on nodes in two ways counts with the fewest nodes.
    """
    rows = {str(row["run_id"]): row for row in records(results.runs)}
    curves: dict[str, dict[int, Size]] = {}
    for size in sizes(results.runs):
        if size.images_per_s is not None and size.world_size:
            curves.setdefault(size.series, {}).setdefault(size.world_size, size)
    return [
        _series(name, list(curve.values()), rows, links, algorithm)
        for name, curve in curves.items()
    ]


def _series(
    name: str,
    curve: Sequence[Size],
    rows: Mapping[str, Mapping[str, Any]],
    links: Links,
    algorithm: str,
) -> SeriesSteps:
    """One series; what cannot be modelled is refused in words."""
    if note := next((s.note for s in curve if s.note), ""):
        return SeriesSteps(name, refused=note)
    try:
        points = tuple(_point(s, rows[s.ok_runs[0]], links, algorithm) for s in curve)
        tests = tuple(held_out(points))
        return SeriesSteps(name, points, fit_steps(points), tests)
    except UsageError as error:
        return SeriesSteps(name, refused=str(error))


def _point(size: Size, run: Mapping[str, Any], links: Links, algorithm: str) -> Point:
    """The step of one size. run: the row of one of its runs, for the settings."""
    ranks, nodes, batch = size.world_size, size.nodes, size.global_batch_size
    if pd.isna(run["parameters"]) or not (ranks and nodes and batch and size.images_per_s):
        raise UsageError("the logs do not say parameters, nodes and batch of every size")
    moved = communication_s(messages(run), ranks, nodes, links, algorithm)
    return Point(ranks, batch / ranks, moved, batch / size.images_per_s)


def messages(run: Mapping[str, Any]) -> list[Message]:
    """The collectives of one optimizer step, by the settings of a run (a row of results.csv).

    ddp: all-reduces of the gradients, in buckets; with ZeRO-1 the parameters once more. fsdp: the
    parameters are gathered in each forward pass and, where they were freed, in each backward pass;
    gradients are scattered once. Its blocks count as one message: their latency is not in it.
    Raises UsageError for strategies that move something else.
    """
    strategy, parameters = run["strategy"], int(run["parameters"])
    if strategy == "ddp" and run["ddp_comm_hook"] != "powersgd":
        return _of_ddp(run, parameters)
    if strategy == "fsdp" and run["fsdp_hybrid_replicas"] == 1:
        return _of_fsdp(run, parameters)
    if strategy in ("single", "dp"):
        return []
    raise UsageError(
        "the model knows what ddp (without PowerSGD) and fsdp (not hybrid) move, and no other"
    )


def _of_ddp(run: Mapping[str, Any], parameters: int) -> list[Message]:
    element = _BYTES[run["ddp_comm_hook"]] if run["ddp_comm_hook"] != "none" else 4
    # Buckets are filled with gradients before a hook makes them smaller.
    buckets = max(1, math.ceil(parameters * 4 / (run["ddp_bucket_mib"] * _MIB)))
    found = [Message("all_reduce", parameters * element / buckets, buckets)]
    return found + [Message("all_gather", parameters * 4)] * bool(run["zero1"])


def _of_fsdp(run: Mapping[str, Any], parameters: int) -> list[Message]:
    low = _BYTES[run["precision"]]
    gathers = int(run["accumulate"]) * (2 if run["fsdp_reshard_after_forward"] else 1)
    reduced = 4 if run["fsdp_reduce_fp32"] else low
    return [
        Message("all_gather", parameters * low, gathers),
        Message("reduce_scatter", parameters * reduced),
    ]


def step_lines(found: Sequence[SeriesSteps]) -> list[str]:
    """The models for a terminal, a line each."""
    lines = []
    for one in found:
        if one.refused:
            lines.append(f"no step model of {one.series}: {one.refused}")
            continue
        lines.append(f"step model: {one.series}: {_said(one)}")
        lines += [f"on paper: {one.series}: {_parts(one, p)}" for p in one.points]
        lines += [
            f"held out: {one.series}: fitted to {', '.join(map(str, t.fitted))} ranks, {t.ranks} "
            f"foretold {t.predicted_s * 1e3:.4g} ms a step, measured {t.measured_s * 1e3:.4g} ms: "
            f"{t.error_share:+.1%}"
            for t in one.tests
        ]
    return lines


def _said(one: SeriesSteps) -> str:
    model = one.model
    assert model is not None
    return (
        f"{model.fixed_s * 1e3:.4g} ms and {model.per_sample_s * 1e6:.4g} us a sample, "
        f"communication hides behind {model.overlap_share:.0%} of it (fitted to all sizes)"
    )


def _parts(one: SeriesSteps, p: Point) -> str:
    """Where the time of a step goes at one size."""
    model = one.model
    assert model is not None
    compute, exposed = model.compute_s(p.samples), model.exposed_s(p.samples, p.communication_s)
    return (
        f"{p.ranks} rank{'s' * (p.ranks > 1)}: computation {compute * 1e3:.4g} ms, communication "
        f"{p.communication_s * 1e3:.4g} ms, of which {exposed * 1e3:.4g} ms show; measured "
        f"{p.step_s * 1e3:.4g} ms in all"
    )


def step_table(found: Sequence[SeriesSteps]) -> TextTable:
    """The held-out sizes for the report, with the reasons where there is no model."""
    heads = ["series", "fitted to ranks", "held out", "foretold (ms)", "measured (ms)", "error"]
    rows = [
        [
            one.series,
            ", ".join(map(str, t.fitted)),
            str(t.ranks),
            f"{t.predicted_s * 1e3:.4g}",
            f"{t.measured_s * 1e3:.4g}",
            f"{t.error_share:+.1%}",
        ]
        for one in found
        for t in one.tests
    ]
    notes = ["Time of a step = computation + what communication does not hide behind it."] * bool(
        rows
    )
    notes += [f"{one.series}: {_said(one)}." for one in found if one.model]
    notes += [f"No step model of {one.series}: {one.refused}." for one in found if one.refused]
    return TextTable(heads, rows, 2, notes)
