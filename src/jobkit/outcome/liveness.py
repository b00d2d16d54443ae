"""Whether what job.json names is still at work."""

from collections.abc import Mapping
from typing import Any

from jobkit.processes import is_alive, process_start

__all__ = ["is_alive", "is_at_work", "process_start"]


def is_at_work(job: Mapping[str, Any]) -> bool | None:
    """Whether a start that job.json tells of is alive: who runs it, or what that one started.

    None: it cannot be told from this machine.
    """
    child = job.get("child")
    known = is_alive(job)
    if known is False and isinstance(child, Mapping):
        return is_alive({**job, **child})
    return known
