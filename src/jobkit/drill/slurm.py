"""Slurm as the place of a drill."""

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from jobkit.drill.minicluster import Minicluster
from jobkit.drill.place import Size, Started
from jobkit.errors import UsageError
from jobkit.launch.command import RUN_SH, job_command
from jobkit.launch.site import Site
from jobkit.launch.slurm_options import (
    Options,
    Shape,
    output_file,
    sbatch_options,
    verbatim,
    warning,
)
from jobkit.outcome import slurm_jobs
from jobkit.paths import REPOSITORY, RunPaths, write_whole
from jobkit.spec.runspec import PlannedRun

_SETTLED_S = 3.0  # a job that Slurm requeues shows a final state for a moment
_REQUEUED = ("NODE_FAIL", "PREEMPTED")


def slurm(words: list[str], **env: str) -> "subprocess.CompletedProcess[str]":
    """Call a Slurm command with additional environment variables, which a job inherits."""
    from jobkit.launch.slurm_cluster import call

    return call(["env", *(f"{k}={v}" for k, v in env.items()), *words])


@dataclass(kw_only=True)
class SlurmStart(Started):
    """A Slurm job."""

    job_id: str
    nodes: list[str] = field(default_factory=list)  # of its first start
    _since: float = 0.0

    def look(self) -> bool:
        shown = slurm(["scontrol", "-o", "show", "job", self.job_id])
        fields = dict(re.findall(r"(?:^| )(\w+)=(\S*)", shown.stdout))
        state, now = fields.get("JobState", ""), time.time()
        if "Invalid job id" in shown.stderr:  # it ended, and MinJobAge is short here
            self.ends += [now] * (len(self.begins) - len(self.ends))
            self.over, self.said = True, f"Slurm job {self.job_id}: job not found"
            return False
        if state in ("RUNNING", "COMPLETING") or "ExitCode" not in fields:
            self._since = 0.0
        if state == "RUNNING" and len(self.begins) <= int(fields["Restarts"]):
            self.ends += [now] * (len(self.begins) - len(self.ends))
            self.begins.append(now)
            self.nodes = self.nodes or _expand(fields["NodeList"])
        elif state not in ("", "RUNNING") and len(self.ends) < len(self.begins):
            self.ends.append(now)
        if slurm_jobs.STATUS.get(state, "pending") in ("pending", "running"):
            return True
        self._since = self._since or now
        if state not in _REQUEUED or now - self._since > _SETTLED_S:
            self.over, self.said = True, f"Slurm job {self.job_id}: {state}"
        return not self.over

    def cancel(self) -> None:
        slurm(["scancel", self.job_id])


def _expand(nodes: str) -> list[str]:
    """Return the node names in a Slurm host list such as n[1-3]."""
    return slurm(["scontrol", "show", "hostnames", nodes]).stdout.split()


class SlurmPlace:
    """A cluster, or a minicluster, all of whose processes are on this machine."""

    name = "slurm"
    size: ClassVar[Size] = {"nodes": 2, "ranks_per_node": 1}

    def __init__(self, site: Site, options: Options, urgent: str | None) -> None:
        """options: sbatch's, for every job. urgent: a partition that preempts others' jobs."""
        self.site, self.options = site, options
        self.sees_processes = Minicluster.named() is not None
        self.poll_s = 0.8 if self.sees_processes else 5.0  # a controller has other users
        names = slurm(["sinfo", "-h", "-o", "%R"]) if self.sees_processes else None
        partitions = names.stdout.split() if names else []
        self.urgent = urgent or ("urgent" if "urgent" in partitions else None)

    def start(
        self, spec: PlannedRun, paths: RunPaths, env: Mapping[str, str], again: bool, more: Options
    ) -> Started:
        """Submit the run; jobkit or Slurm may requeue it. Raises UsageError when it is refused."""
        from jobkit.launch.slurm_cluster import refusal

        options = self._options(spec, paths, more)
        given = [f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items()]
        write_whole(paths.site, self.site.shell())
        words = ["sbatch", "--parsable", *given, str(RUN_SH), *job_command(spec, paths, False)[2:]]
        own = {"JOBKIT_ROOT": str(REPOSITORY), "JOBKIT_PYTHON": sys.executable}
        done = slurm(words, **own, **env)
        if done.returncode:
            raise UsageError(refusal(done.stderr, options))
        return SlurmStart(job_id=done.stdout.strip().split(";")[0])

    def _options(self, spec: PlannedRun, paths: RunPaths, more: Options) -> Options:
        shape = Shape(spec.nodes, spec.ranks_per_node)
        given = {"time": "10", **self.options, **more}
        made = sbatch_options(shape, self.site, given, f"drill-{paths.folder.name}")
        log = output_file(paths.log)
        return {**made, **warning(made, spec.stop_signal), "output": log, "error": log}

    def warn(self, started: Started) -> None:
        """Send the stop signal, as Slurm does before the time limit."""
        assert isinstance(started, SlurmStart)
        slurm(["scancel", "--signal=USR2", started.job_id])

    def terminate_ranks(self, started: Started, mark: str) -> None:
        """Send SIGTERM to the job step only."""
        assert isinstance(started, SlurmStart)
        slurm(["scancel", "--signal=TERM", started.job_id])

    def preempt(self, nodes: list[str]) -> str:
        """Submit a job that preempts those on the nodes; return why it was refused, or empty."""
        words = ["sbatch", f"--partition={self.urgent}", f"--nodes={len(nodes)}", "--exclusive"]
        words += [f"--nodelist={','.join(nodes)}", "--output=/dev/null", "--job-name=drill-urgent"]
        own = {"account": self.site.account, "qos": self.site.qos}
        given = {**own, **verbatim(self.site.sbatch), **self.options}
        words += [f"--{key}={given[key]}" for key in own if given[key]]
        done = slurm([*words, "--time=1", "--wrap", "sleep 2"])
        return done.stderr.strip() or "sbatch failed" if done.returncode else ""


def first_row(job_id: str) -> slurm_jobs.Job | None:
    """What sacct says of a job's first start; None where it says nothing, or that it was requeued
    at the job's own request.
    """
    form = "--format=JobID,State,ExitCode,Elapsed,NodeList,AllocTRES,MaxRSS"
    shown = slurm(["sacct", "-D", "-X", "-P", "-n", "-j", job_id, form]).stdout
    for line in shown.splitlines()[:1]:
        job = slurm_jobs.read_sacct(line).get(job_id)
        return job if job and job.status not in ("pending", "running") else None
    return None
