"""What measured the rates of programs that are not jobkit's own, in words."""

import pandas as pd

from jobkit.analysis.collect.lines import METRIC_LINES
from jobkit.analysis.collect.results import Results
from jobkit.analysis.collect.rows import OF_EPOCHS, WALL_TIME

_WORDS = {
    "auto": "measured by the start-up hook",
    "meter": "measured by the meter",
    METRIC_LINES: "read from [METRIC] lines",
    WALL_TIME: WALL_TIME,
    OF_EPOCHS: f"measured over {OF_EPOCHS}",
} | {
    name: f"measured by the adapter for {name.capitalize()}"
    for name in ("lightning", "transformers", "accelerate")
}
INFERRED = "inferred"  # of the work of a step: nobody has stated it


def rate_sources(runs: pd.DataFrame) -> list[str]:
    """What measured the runs' rates, each source once, and whether the samples are inferred."""
    known = runs.dropna(subset=["throughput_source"])
    found = []
    for source, own in known.groupby("throughput_source", sort=True):
        words = _WORDS.get(str(source), f"read by {source}")
        inferred = (own["work_source"] == INFERRED).any()
        found.append(words + (", samples inferred from the batches" if inferred else ""))
    return found


def inferred_work(results: Results) -> list[str]:
    """A sentence where the rate is of samples that nobody has stated; none elsewhere."""
    ok = results.runs["status"] == "ok"
    known = results.runs.loc[ok, ["throughput", "work_source"]].dropna(subset=["throughput"])
    own = known[known["work_source"] == INFERRED]
    if own.empty:
        return []
    of = "" if len(own) == len(known) else f" of {len(own)} of {len(known)} runs"
    text = f"The rates{of} count samples inferred from the batches of the loaders: the study "
    return [f"{text}states none (--work-per-step, or per_step in [work])."]
