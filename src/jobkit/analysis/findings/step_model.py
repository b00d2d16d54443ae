"""The step model of a study: what each series sends, and how well held-out sizes are predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.step_fit import HeldOut, Point, StepModel, fit_steps, held_out
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import TextTable
from jobkit.errors import UsageError
from jobkit.spec.runspec import SETTINGS
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import Links, Message, ModelSize, measured, seconds

_FP32 = 4  # bytes
_FAR_OFF = 0.1  # error of a held-out size that the model's limits name


@dataclass(frozen=True)
class SeriesSteps:
    """The step model of one series; refused says why there is none."""

    series: str
    points: tuple[Point, ...] = ()
    model: StepModel | None = None  # fitted to all sizes
    tests: tuple[HeldOut, ...] = ()
    refused: str = ""
    carried: tuple[int, ...] = ()  # ranks whose collectives were not measured on as many

    @property
    def limit(self) -> str:
        """What the model takes for granted, and how far off it was; empty where neither counts."""
        said = []
        if self.carried:
            said.append(
                f"collectives were not measured on {', '.join(map(str, self.carried))} ranks: "
                "their time there follows from the links by a ring's formula"
            )
        worst = max((t.error_share for t in self.tests), key=abs, default=0.0)
        if abs(worst) >= _FAR_OFF:
            said.append(f"a held-out size was missed by {worst:+.0%}: so may larger ones be")
        return "; ".join(said)


def step_models(results: Results, links: Links) -> list[SeriesSteps]:
    """The step model of every series with a size that was measured.

    A size that was measured on nodes in two ways counts with the fewest nodes.
    """
    rows = {
        run_id: {**results.settings(run_id), **row}
        for row in records(results.runs)
        if (run_id := str(row["run_id"]))
    }
    curves: dict[str, dict[int, Size]] = {}
    for size in results.sizes:
        if size.throughput is not None and size.world_size:
            curves.setdefault(size.series, {}).setdefault(size.world_size, size)
    return [_series(name, list(curve.values()), rows, links) for name, curve in curves.items()]


def _series(
    name: str, curve: Sequence[Size], rows: Mapping[str, Mapping[str, Any]], links: Links
) -> SeriesSteps:
    """One series; where it cannot be modelled, the reason."""
    if note := next((s.note for s in curve if s.note), ""):
        return SeriesSteps(name, refused=note)
    try:
        points = tuple(_point(s, rows[s.ok_runs[0]], links) for s in curve)
        pairs = sorted((p.ranks, s.ok_runs[0]) for p, s in zip(points, curve, strict=True))
        carried = tuple(
            ranks for ranks, run in pairs if any(_carried(m, links) for m in messages(rows[run]))
        )
        tests = tuple(held_out(points))
        return SeriesSteps(name, points, fit_steps(points), tests, carried=carried)
    except UsageError as error:
        return SeriesSteps(name, refused=str(error))


def _carried(message: Message, links: Links) -> bool:
    """Whether the time of a message follows from links, and not from its own measurement."""
    return message.scope.ranks > 1 and measured(message, links) is None


def _point(size: Size, run: Mapping[str, Any], links: Links) -> Point:
    """The step of one size. run: the row of one of its runs, for the settings."""
    ranks, batch = size.world_size, size.global_batch_size
    if pd.isna(run["parameters"]) or not (ranks and batch and size.throughput):
        raise UsageError("the logs do not say parameters and batch of every size")
    sent = seconds(messages(run), links)
    return Point(ranks, batch / ranks, sent, batch / size.throughput)


def messages(run: Mapping[str, Any]) -> list[Message]:
    """The messages of one optimizer step, by the settings of a run (a row of results.csv).

    FSDP's shard groups count as equal in size; where their number was not recorded, as one. Raises
    UsageError for what does not follow from the settings.
    """
    settings = {k: None if pd.isna(v) else v for k, v in run.items() if k in SETTINGS}
    facts = FACTS.get(str(settings["strategy"]))
    size = _size(int(run["parameters"]) * _FP32, run.get("shard_groups"))
    try:
        found = facts.messages(settings, size) if facts and facts.is_modelled(settings) else None
    except (KeyError, TypeError):
        raise UsageError("the logs do not say every setting that decides the traffic") from None
    if found is None:
        raise UsageError(
            "what it sends does not follow from the logs: ddp (without PowerSGD) and fsdp have a "
            "step model"
        )
    return found


def _size(parameters: int, groups: Any) -> ModelSize:
    """The size of a model in bytes. Of its shard groups the last one stays gathered."""
    if pd.isna(groups) or groups < 1:
        return ModelSize(parameters=parameters)
    each = parameters / int(groups)
    others = (each,) * (int(groups) - 1)
    return ModelSize(parameters=parameters, shard_groups=others, kept_groups=(each,))


def step_lines(found: Sequence[SeriesSteps]) -> list[str]:
    """The models for a terminal, one line each."""
    lines = []
    for one in found:
        if one.refused:
            lines.append(f"no step model of {one.series}: {one.refused}")
            continue
        lines.append(f"step model: {one.series}: {_said(one)}")
        lines += [f"model: {one.series}: {_parts(one, p)}" for p in one.points]
        lines += [
            f"held out: {one.series}: fitted to {', '.join(map(str, t.fitted))} ranks, {t.ranks} "
            f"predicted {t.predicted_s * 1e3:.4g} ms per step, measured "
            f"{t.measured_s * 1e3:.4g} ms: {t.error_share:+.1%}"
            for t in one.tests
        ]
        lines += [f"limit: {one.series}: {one.limit}"] * bool(one.limit)
    return lines


def _said(one: SeriesSteps) -> str:
    model = one.model
    assert model is not None
    return (
        f"{model.fixed_s * 1e3:.4g} ms and {model.per_sample_s * 1e6:.4g} us per sample, "
        f"{model.overlap_share:.0%} of it can overlap communication (fitted to all sizes)"
    )


def _parts(one: SeriesSteps, p: Point) -> str:
    """Where the time of a step goes at one size."""
    model = one.model
    assert model is not None
    compute, exposed = model.compute_s(p.samples), model.exposed_s(p.samples, p.communication_s)
    return (
        f"{p.ranks} rank{'s' * (p.ranks > 1)}: computation {compute * 1e3:.4g} ms, communication "
        f"{p.communication_s * 1e3:.4g} ms, of which {exposed * 1e3:.4g} ms are exposed; measured "
        f"{p.step_s * 1e3:.4g} ms in all"
    )


def step_table(found: Sequence[SeriesSteps], chosen: Sequence[str] = ()) -> TextTable:
    """The held-out sizes for the report, with the reasons where there is no model.

    chosen: which forecasts are taken, and why.
    """
    heads = ["series", "fitted to ranks", "held out", "predicted (ms)", "measured (ms)", "error"]
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
    notes = ["Time of a step = computation + exposed communication."] * bool(rows)
    notes += [f"{one.series}: {_said(one)}." for one in found if one.model]
    notes += [f"Limit of {one.series}: {one.limit}." for one in found if one.limit]
    notes += [f"No step model of {one.series}: {one.refused}." for one in found if one.refused]
    notes += [f"{line[0].upper()}{line[1:]}." for line in chosen]
    return TextTable(heads, rows, 2, notes)
