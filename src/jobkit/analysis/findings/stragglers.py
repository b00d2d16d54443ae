"""Steps that take longer than the others, in words."""

from jobkit.analysis.collect.results import Results
from jobkit.analysis.tables.text import counted_ranks

_FEWEST = 20  # steps of which the 99th percentile is spoken of


def uneven_steps(results: Results, unit: str) -> list[str]:
    """A sentence on the size whose steps are the most uneven; none where none was measured."""
    runs = results.runs[results.runs["status"] == "ok"]
    known = runs.dropna(subset=["series", "world_size", "step_p50_s", "step_p99_s", "steps_timed"])
    known = known[(known["steps_timed"] >= _FEWEST) & (known["step_p50_s"] > 0)]
    if known.empty:
        return []
    known = known.assign(factor=(known["step_p99_s"] / known["step_p50_s"]).astype(float))
    middle = known.groupby(["series", "world_size"], as_index=False)["factor"].median()
    worst = middle.loc[middle["factor"].idxmax()]
    where = f"{worst['series']} on {counted_ranks(int(worst['world_size']), unit)}"
    most = f"most uneven in {where}" if len(middle) > 1 else f"of {where}"
    times = f"{worst['factor']:.2f} times the median"
    return [f"Single steps, {most}: the 99th percentile of their time is {times}."]
