"""Runs of a study on Slurm that ran on the same node at the same time."""

from typing import Any

from jobkit.analysis.collect.results import Results
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import counted

_SHOWN = 6  # run_ids, nodes


def shared_nodes(results: Results) -> list[str]:
    """A sentence on the successful runs that shared a node with another; empty where none did."""
    needed = ["job_id", "node_list", "start_time_s", "end_time_s"]
    runs = results.runs[["run_id", "status", *needed]].dropna(subset=needed)
    nodes, names, jobs = set(), set(), list[bool]()  # jobs: whether both are of one
    ok = set(runs["run_id"][runs["status"] == "ok"])  # a failed run may have disturbed these
    newest: dict[str, tuple[float, str, Any]] = {}  # by node: the latest end, and whose it is
    for run in records(runs.sort_values("start_time_s")):
        for node in set(run["node_list"].split(",")):
            end, before, job = newest.get(node, (0.0, "", None))
            disturbed = {before, run["run_id"]} & ok
            if run["start_time_s"] < end and disturbed:
                nodes.add(node)
                names |= disturbed
                jobs.append(job == run["job_id"])
            own = run["end_time_s"], run["run_id"], run["job_id"]
            newest[node] = max((end, before, job), own, key=lambda one: one[0])
    if not names:
        return []
    advice = ["--exclusive"] * (not all(jobs)) + ["--max-running 1"] * any(jobs)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    rates = "its rate" if len(names) == 1 else "their rates"
    text = (
        f"{counted(len(names), 'run')} shared a node with another at the same time, so {rates} "
        f"may be disturbed (on {', '.join(sorted(nodes)[:_SHOWN])}): "
        f"{', '.join(sorted(names)[:_SHOWN])}{more}. Use {' and '.join(advice)}."
    )
    return [text]
