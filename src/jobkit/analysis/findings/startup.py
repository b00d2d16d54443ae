"""The parts of the start-up, for the sizes at which it is a large part of a run."""

from jobkit.analysis.collect.results import Results
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import TextTable, say
from jobkit.metric.kinds import KINDS

LEAST = 0.1  # of a run's time: below it the start-up is not worth a table
_PARTS = tuple(name for name in KINDS["startup"] if name != "total_s")


def startup_table(results: Results) -> TextTable:
    """Series, ranks, share of the run's time, seconds and their parts: medians over the repeats.

    Only the sizes whose start-up takes more than LEAST of a successful run. What the parts leave
    of the sum is the check of the ranks, records and checkpoints before the first iteration.
    """
    names = ["startup_s", *(f"startup_{part}" for part in _PARTS)]
    runs = results.runs.dropna(subset=["startup_s", "total_time_s", "world_size"])
    runs = runs[(runs["status"] == "ok") & (runs["total_time_s"] > 0)]
    runs = runs.assign(share=runs["startup_s"] / runs["total_time_s"])
    groups = runs.groupby(["series", "world_size"], sort=True)[["share", *names]]
    found = groups.median().reset_index()
    rows = [
        [
            row["series"],
            say(row["world_size"]),
            say(row["share"], "{:.0%}"),
            *(say(row[name], "{:.3g}") for name in names),
        ]
        for row in records(found[found["share"] > LEAST])
    ]
    heads = ["series", "ranks", "share of the run", "start-up (s)"]
    heads += [f"{part.removesuffix('_s').replace('_', ' ')} (s)" for part in _PARTS]
    note = (
        f"Sizes whose start-up takes more than {LEAST:.0%} of the run, medians over the repeats; "
        "the first step comes after it. Longer runs, or an environment unpacked on each node "
        "(docs/clusters.md), make it less."
    )
    return TextTable(heads, rows, 1, [note])
