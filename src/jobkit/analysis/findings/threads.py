"""Threads against processes: the same cores to one process, or to several with fewer threads."""

from statistics import median

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import IMAGES
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import counted, rounded

Way = tuple[int, int, str]  # processes, threads of each, series


def thread_lines(results: Results) -> list[str]:
    """A table of the ways in which the same cores were divided, and which is faster here.

    Empty where the runs on CPUs of one node did not divide the same cores in several ways. One way
    is called faster only where its slowest repeat beats the fastest of all others.
    """
    found = _rates(results)
    cores = max((processes * threads for processes, threads, _ in found), default=0)
    rates = {way: each for way, each in found.items() if way[0] * way[1] == cores}
    if len({threads for _, threads, _ in rates}) < 2:
        return []
    order = sorted(rates, key=lambda way: -median(rates[way]))
    first = f"{counted(cores, 'core')} as threads or processes, the fastest first:"
    best, others = order[0], [rate for way in order[1:] for rate in rates[way]]
    if min(map(len, rates.values())) < 2:
        last = "one repeat alone does not say which is faster: --repeats 3"
    elif min(rates[best]) > max(others):
        last = f"{_words(best)} is faster than every other way in each repeat"
    else:
        last = "the repeats overlap: none is faster for certain"
    rows = [f"  {_words(way)}: {rounded(median(rates[way]))} {IMAGES}" for way in order]
    return [first, *rows, last]


def _rates(results: Results) -> dict[Way, list[float]]:
    """The rates of the successful runs on the CPUs of one node, by the way of using them."""
    needed = ["threads_used", "world_size", "images_per_s"]
    kept = [*needed, "status", "device_type", "nodes", "series"]
    runs = results.runs[kept].dropna(subset=needed)
    runs = runs[(runs["status"] == "ok") & (runs["device_type"] == "cpu") & (runs["nodes"] == 1)]
    found: dict[Way, list[float]] = {}
    for run in records(runs):
        way = (int(run["world_size"]), int(run["threads_used"]), str(run["series"]))
        found.setdefault(way, []).append(float(run["images_per_s"]))
    return found


def _words(way: Way) -> str:
    processes, threads, series = way
    return f"{counted(processes, 'process')} x {counted(threads, 'thread')} ({series})"
