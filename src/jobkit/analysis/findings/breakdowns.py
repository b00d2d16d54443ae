"""Where the time of an iteration goes at each size, and the table of its efficiencies."""

from collections.abc import Callable
from dataclasses import dataclass

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling import pop
from jobkit.analysis.scaling.pop import Efficiencies, Step
from jobkit.analysis.scaling.sizes import Size, sizes
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import TextTable

_HEADS = ("load balance", "communication efficiency", "data wait factor", "parallel efficiency")
_NOTE = (
    "100% is a factor that loses nothing. Load balance: useful time of the mean rank over that of "
    "the slowest. Communication efficiency: the part of an iteration that the busiest rank does "
    "not spend in exposed communication; data wait factor: the part of that without waiting for "
    "batches. Parallel efficiency is the product of these three. Computation scalability: useful "
    "seconds of all ranks for one sample at the smallest size, over those at this size. Global "
    "efficiency is the product of the two. Model: POP centre of excellence (pop-coe.eu)."
)


@dataclass(frozen=True)
class Broken:
    """A size whose iterations were broken down, and how efficient they are."""

    size: Size
    step: Step
    own: Efficiencies
    base: Efficiencies  # of the smallest size of the series that was broken down


def broken_sizes(results: Results) -> list[Broken]:
    """The sizes with a breakdown record, series by series, small sizes first.

    Of the repeats, the one with the median iteration stands for the size, so that its parts
    belong together. A series whose runs must not be compared is left out.
    """
    rows = {str(row["run_id"]): row for row in records(results.runs)}
    found: list[Broken] = []
    bases: dict[str, Step] = {}
    for size in sizes(results.runs):
        times = [pop.breakdown(rows[run_id], "breakdown_") for run_id in size.ok_runs]
        known = sorted((t for t in times if t), key=lambda t: t.iteration_s)
        if not known or size.note or not size.world_size or not size.global_batch_size:
            continue
        step = Step(known[(len(known) - 1) // 2], size.world_size, size.global_batch_size)
        base = bases.setdefault(size.series, step)
        own = pop.efficiencies(step, base)
        found.append(Broken(size, step, own, pop.efficiencies(base, base)))
    return found


def efficiency_table(found: list[Broken], unit: str) -> TextTable:
    """The efficiencies of each size as the report shows them. unit: GPUs, or processes (ranks)."""
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
    """By series, ranks and nodes: why a size loses, as the end of a sentence.

    Without a breakdown record, what the epochs say: how long the ranks waited for data.
    """
    said: dict[tuple[str, int, int], str] = {}
    ok = results.runs[results.runs["status"] == "ok"]
    waits = ok.groupby(["series", "world_size", "nodes"])["data_wait_share"].median().dropna()
    for row in records(waits.reset_index()):
        share, key = row["data_wait_share"], (row["series"], row["world_size"], row["nodes"])
        said[key] = f"; waiting for data takes {share:.0%} of its time, the rest is not broken down"
    for one in broken_sizes(results):
        said[one.size.series, one.step.ranks, one.size.nodes or 1] = _cause(one)
    return said


def _cause(one: Broken) -> str:
    """The factors that fell most since the smallest size, in words; empty where none fell."""
    words = [_WORDS[name](one) for name in pop.losses(one.own, one.base)]
    return f", because {' and '.join(words)}" if words else ""


def _waited(one: Broken) -> str:
    times = one.step.times
    share = (times.busy_max_s - times.useful_max_s) / times.iteration_s
    return f"waiting for data takes {share:.0%} of the step"


def _uneven(one: Broken) -> str:
    more = 1 / one.own.load_balance - 1
    return f"the load is uneven: the slowest rank works {more:.0%} longer than the mean"


def _grown(one: Broken) -> str:
    more = 1 / one.own.computation - 1
    return f"all ranks together work {more:.0%} longer for an image than at the smallest size"


_WORDS: dict[str, Callable[[Broken], str]] = {
    "communication": lambda one: (
        f"exposed communication takes {1 - one.own.communication:.0%} of the step"
    ),
    "data_wait": _waited,
    "load_balance": _uneven,
    "computation": _grown,
}


def _factors(own: Efficiencies) -> tuple[float, ...]:
    """In the order of the table's columns."""
    return (
        own.load_balance,
        own.communication,
        own.data_wait,
        own.parallel,
        own.computation,
        own.overall,
    )
