"""Runs of this machine that outlived their launcher, as after `kill -9`: one more would be timed
beside them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.paths import StudyPaths, read_json
from jobkit.processes import is_alive


def refuse(study: StudyPaths) -> None:
    """Raise UsageError, which names the process, where a run of the folder is at work.

    No launcher runs them. Also a run that is not of today's plan counts.
    """
    for path in sorted(study.folder.glob("*/job.json")):
        if pid := _at_work(read_json(path)):
            raise UsageError(
                f"{path.parent.name} of {study.folder.name} still runs, as process {pid}, though "
                f"its launcher was killed: wait for its end, or end it: kill {pid}"
            )


def _at_work(job: Mapping[str, Any] | None) -> int | None:
    """The pid of this user's process of this machine that runs what job.json tells of."""
    if not job or job.get("launcher") != "local" or job.get("ended") is not None:
        return None
    child = job.get("child")
    # Its child, run.sh, goes on where it was killed itself.
    for record in (job, {**job, **child} if isinstance(child, Mapping) else {}):
        if is_alive(record) and _is_own(record["pid"]):
            return int(record["pid"])
    return None


def _is_own(pid: int) -> bool:
    """Whether a process is this user's: whoever wrote the file must not choose who is signalled."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    except OSError:
        return False
