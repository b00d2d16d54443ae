"""Runs far from the median of their size, in words."""

from statistics import median

from jobkit.analysis.collect.results import Results
from jobkit.analysis.tables.text import counted

_SHOWN = 6  # run_ids


def outlying(results: Results) -> list[str]:
    """A sentence on the runs that are outliers among their repeats; empty where none is.

    Most disturbances slow a run down: one far above the median may be the only sound one.
    """
    found: list[tuple[str, float]] = []
    bases = []
    first: dict[str, object] = {}  # of each series the size that the others are compared with
    for size in results.sizes:
        if size.speed_up is not None:
            first.setdefault(size.series, size)
        names = size.outliers.split(", ") if size.outliers else []
        middle = median(size.rates) if size.rates else 0.0
        own = [
            (run, rate / middle - 1)
            for run, rate in zip(size.rated_runs, size.rates, strict=True)
            if run in names
        ]
        found += own
        if first.get(size.series) is size and any(share > 0 for _, share in own):
            bases.append(size.series)
    if not found:
        return []
    shown = ", ".join(f"{run} ({share:+.0%})" for run, share in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    what = "is an outlier" if len(found) == 1 else "are outliers"
    text = (
        f"{counted(len(found), 'run')} {what}, by the distance from the median of the size: "
        f"{shown}{more}. Medians keep such runs, forecasts leave them out."
    )
    if any(share > 0 for _, share in found):
        text += " One far above may mean that the others of its size were disturbed: repeat that "
        text += f"size, the baseline of {', '.join(bases)} first." if bases else "size."
    return [text]
