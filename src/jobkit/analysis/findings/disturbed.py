"""Slurm jobs of a study that ran on the same node at the same time."""

from jobkit.analysis.collect.results import Results
from jobkit.analysis.tables.frames import records
from jobkit.analysis.tables.text import counted

_SHOWN = 6  # run_ids, nodes


def shared_nodes(results: Results) -> list[str]:
    """A sentence on the successful runs that shared a node with another; empty where none did."""
    needed = ["job_id", "node_list", "start_time_s", "end_time_s"]
    ok = results.runs["status"] == "ok"
    runs = results.runs.loc[ok, ["run_id", *needed]].dropna(subset=needed)
    nodes, names = set(), set()
    newest: dict[str, tuple[float, str]] = {}  # by node: the latest end so far, and whose it is
    for run in records(runs.sort_values("start_time_s")):
        for node in set(run["node_list"].split(",")):
            end, before = newest.get(node, (0.0, ""))
            if run["start_time_s"] < end:
                nodes.add(node)
                names |= {before, run["run_id"]}
            newest[node] = max((end, before), (run["end_time_s"], run["run_id"]))
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text = (
        f"{counted(len(names), 'run')} shared a node with another at the same time, so their rates "
        f"may be disturbed (on {', '.join(sorted(nodes)[:_SHOWN])}): "
        f"{', '.join(sorted(names)[:_SHOWN])}{more}. Use --exclusive."
    )
    return [text]
