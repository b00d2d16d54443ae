"""The report's table of the scaling laws fitted to each series."""

from collections.abc import Sequence

from jobkit.analysis.findings.forecast import SOURCES, Forecast
from jobkit.analysis.scaling.fits import Estimate, Fit
from jobkit.analysis.tables.text import NONE, TextTable, counted

LAW_NAMES = {
    "amdahl": "Amdahl",
    "usl": "Universal Scalability Law",
    "gustafson": "Gustafson",
    **SOURCES,
}
_HEADS = (
    *("series", "law", "parameter", "value", "95 % interval", "R\N{SUPERSCRIPT TWO}"),
    "largest error",
)
_SHARES = ("serial_fraction", "contention")  # of the work: none is above 1
_BAD = 0.25  # the largest error of a size with which a law does not describe a series


def laws_table(found: Sequence[Forecast]) -> TextTable:
    """The fitted parameters of every series, with intervals and goodness of fit.

    A share of the work that comes out above 1 has no value: the series gets slower with its size.
    """
    fits = [(one.series, fit) for one in found for fit in one.fits]
    rows = [_row(series, fit, estimate) for series, fit in fits for estimate in fit.estimates]
    notes = [f"No fit: {one.refused}." for one in found if one.refused]
    if rows:
        notes.append("They describe the measured sizes; a forecast is an average over other laws.")
    notes += [
        f"{one.series}: fitted without {counted(one.left_out, 'outlier')}."
        for one in found
        if one.left_out and one.fits
    ]
    notes += [note for series, fit in fits for note in _doubts(series, fit)]
    if any(_rounded(e.value) < 0 for _, fit in fits for e in fit.estimates):
        notes.append("A value below 0 means superlinear speed-up at some size.")
    return TextTable(_HEADS, rows, 3, notes)


def _row(series: str, fit: Fit, estimate: Estimate) -> list[str]:
    low, high = _rounded(estimate.low), _rounded(estimate.high)
    none = _impossible(estimate)
    return [
        series,
        LAW_NAMES[fit.law],
        estimate.name.replace("_", " "),
        NONE if none else f"{_rounded(estimate.value):.4f}",
        NONE if none else f"{low:.4f} to {high:.4f}",
        f"{fit.r_squared:.4f}",
        f"{fit.worst:.1%}",
    ]


def _rounded(value: float) -> float:
    """The value as it is shown, without a minus before 0."""
    return round(value, 4) + 0.0


def _impossible(estimate: Estimate) -> bool:
    """Whether it is a share of the work above 1, so that there is no such share."""
    return estimate.name in _SHARES and _rounded(estimate.value) > 1


def _doubts(series: str, fit: Fit) -> list[str]:
    """What the numbers of a law do not say."""
    said = []
    for one in fit.estimates:
        name = one.name.replace("_", " ")
        if _impossible(one):
            doubt = "" if one.low > 1 else " (uncertain: the interval includes 1)"
            said.append(
                f"{series}: no {name}: as fitted, it gets slower with more ranks{doubt}, where "
                "work that is all serial would keep its rate."
            )
        elif one.name in _SHARES and one.low <= 0 and one.high >= 1:
            said.append(f"{series}: the {name} may be anything from 0 to 1: more runs would tell.")
    if fit.worst > _BAD:
        said.append(
            f"{series}: {LAW_NAMES[fit.law]} misses a measured size by {fit.worst:.0%}, so it does "
            "not describe this series."
        )
    return said
