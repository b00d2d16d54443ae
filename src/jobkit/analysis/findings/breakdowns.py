"""The breakdown of an iteration at each size, and the table of POP efficiencies."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling import pop
from jobkit.analysis.scaling.pop import Breakdown, Efficiencies, Step
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import TextTable

_PARTS = "breakdown_"  # begins the names of the columns of a breakdown
_HEADS = (
    *("load balance", "random balance", "communication efficiency", "data wait factor"),
    "parallel efficiency",
)
_NOTE = (
    "100% means no loss. Load balance: mean over ranks of the useful time / that of the rank that "
    "is slowest over all iterations. Random balance: that / the mean over iterations of the "
    "maximum (ranks that are slow in turn). Data wait factor: maximum useful time / maximum busy "
    "time (useful time and waiting for batches). Communication efficiency: maximum busy time / "
    "time of the iteration. Parallel efficiency is the product of these four. Computation "
    "scalability: useful time per sample, summed over ranks, at the smallest size / at this size. "
    "Global efficiency = parallel efficiency x computation scalability. Model: POP centre of "
    "excellence (pop-coe.eu)."
)


@dataclass(frozen=True)
class SizeBreakdown:
    """A size with a breakdown of its iterations, and their efficiencies."""

    size: Size
    step: Step
    own: Efficiencies
    base: Efficiencies  # of the smallest size of the series that has a breakdown


def size_breakdowns(results: Results) -> list[SizeBreakdown]:
    """The sizes with a breakdown record, series by series, small sizes first.

    Of the repeats, the one with the median iteration stands for the size, so that its parts
    belong together. A series whose runs must not be compared is left out.
    """
    parts = [str(name) for name in results.runs if str(name).startswith(_PARTS)]
    rows = {str(row["run_id"]): row for row in records(results.runs[["run_id", *parts]])}
    found: list[SizeBreakdown] = []
    bases: dict[str, Step] = {}
    for size in results.sizes:
        times = {id: pop.breakdown(rows[id], _PARTS) for id in size.ok_runs}
        known = [t for t in times.values() if t]
        if not known or size.note or not size.world_size or not size.global_batch_size:
            continue
        middle = _middle(known)
        step = Step(middle, size.world_size, size.global_batch_size)
        base = bases.setdefault(size.series, step)
        own = pop.efficiencies(step, base)
        found.append(SizeBreakdown(size, step, own, pop.efficiencies(base, base)))
    return found


def _middle(times: list[Breakdown]) -> Breakdown:
    """The breakdown with the median iteration, of two the shorter."""
    middle = median_low(t.iteration_s for t in times)
    return next(t for t in times if t.iteration_s == middle)


def efficiency_table(found: list[SizeBreakdown], unit: str) -> TextTable:
    """The efficiencies of each size, as the report has them. unit: GPUs, or processes (ranks)."""
    heads = ["series", unit, "nodes", "iteration (ms)", *_HEADS]
    heads += ["computation scalability", "global efficiency"]
    rows = [
        [
            one.size.series,
            str(one.size.world_size),
            str(one.size.nodes),
            f"{1000 * one.step.times.iteration_s:.4g}",
            *(f"{value:.1%}" for value in _factors(one.own)),
        ]
        for one in found
    ]
    return TextTable(heads, rows, 1, [_NOTE])


def causes(results: Results) -> dict[tuple[str, int, int], str]:
    """By series, ranks and nodes: the cause of a size's losses, as the end of a sentence.

    Without a breakdown record: the time that the ranks waited for data, from the epoch records.
    """
    found: dict[tuple[str, int, int], str] = {}
    keys = ["series", "world_size", "nodes"]
    ok = results.runs.loc[results.runs["status"] == "ok", [*keys, "data_wait_share"]]
    waits = ok.groupby(keys)["data_wait_share"].median().dropna()
    for row in records(waits.reset_index()):
        share, key = row["data_wait_share"], (row["series"], row["world_size"], row["nodes"])
        found[key] = f"; waiting for data takes {share:.0%} of the time (no breakdown of the rest)"
    for one in size_breakdowns(results):
        found[one.size.series, one.step.ranks, one.size.nodes or 1] = _cause(one)
    return found


def _cause(one: SizeBreakdown) -> str:
    """The factors that fell most from the smallest size on, in words; empty where none fell."""
    words = [_WORDS[name](one) for name in pop.losses(one.own, one.base)]
    return f", because {' and '.join(words)}" if words else ""


def _waited(one: SizeBreakdown) -> str:
    times = one.step.times
    share = (times.busy_max_s - times.useful_max_s) / times.iteration_s
    return f"waiting for data takes {share:.0%} of the step"


def _uneven(one: SizeBreakdown) -> str:
    more = 1 / one.own.load_balance - 1
    return f"load imbalance: the slowest rank computes {more:.0%} longer than the mean"


def _grown(one: SizeBreakdown) -> str:
    more = 1 / one.own.computation - 1
    return f"computing an image takes {more:.0%} more rank-seconds than at the smallest size"


_WORDS: dict[str, Callable[[SizeBreakdown], str]] = {
    "communication": lambda one: (
        f"exposed communication takes {1 - one.own.communication:.0%} of the step"
    ),
    "random_balance": lambda one: (
        f"ranks that are slow in turn take {1 - one.own.random_balance:.0%} of the step"
    ),
    "data_wait": _waited,
    "load_balance": _uneven,
    "computation": _grown,
}


def _factors(own: Efficiencies) -> tuple[float, ...]:
    """The factors in the order of the table's columns."""
    return (
        own.load_balance,
        own.random_balance,
        own.communication,
        own.data_wait,
        own.parallel,
        own.computation,
        own.overall,
    )
