"""Steps that take longer than the others, in words."""

from jobkit.analysis.collect.lines import METRIC_LINES
from jobkit.analysis.collect.results import Results
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import computing, counted_ranks

_ALL_STEPS = ("pattern ", METRIC_LINES)  # begins of sources that time steps, and no windows
_OF_RUN = "of a run's steps (of fewer than 100 steps: the longest)"
_OF_WINDOW = f"{_OF_RUN.replace('run', 'window')}, slowest rank, median over the windows,"
_FEWEST = 20  # steps of which the 99th percentile is spoken of


def uneven_steps(results: Results, unit: str) -> list[str]:
    """A sentence on the size whose steps are the most uneven; none where none was measured.

    The percentiles of runs measured in windows are medians over the windows' own: a window of fewer
    than 100 steps has its longest step as 99th percentile.
    """
    names = ["series", "world_size", "step_p50_s", "step_p99_s", "steps_timed"]
    ok = results.runs["status"] == "ok"
    known = results.runs.loc[ok, [*names, "devices", "throughput_source"]].dropna(subset=names)
    known = known[(known["steps_timed"] >= _FEWEST) & (known["step_p50_s"] > 0)]
    if known.empty:
        return []
    known = known.assign(factor=(known["step_p99_s"] / known["step_p50_s"]).astype(float))
    sizes = known.groupby(["series", "world_size"], as_index=False)
    middle = sizes[["factor", "devices"]].median()
    worst = records(middle.loc[[middle["factor"].idxmax()]])[0]
    where = f"{worst['series']} on {counted_ranks(computing(worst, unit), unit)}"
    most = f"most uneven in {where}" if len(middle) > 1 else f"of {where}"
    at_size = known["world_size"] == worst["world_size"]
    own = known[(known["series"] == worst["series"]) & at_size]
    sources = own["throughput_source"].fillna("").astype(str)
    single = sources.str.startswith(_ALL_STEPS).all()
    of = _OF_RUN if single else _OF_WINDOW
    times = f"{worst['factor']:.2f} times the median"
    return [f"Single steps, {most}: the 99th percentile {of} is {times}."]
