"""The places where a drill runs: this machine, a Slurm cluster, or a minicluster of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from jobkit.errors import UsageError
from jobkit.launch.command import RUN_SH, clean_environment, job_command, local_command, python_path
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
from jobkit.processes import Children
from jobkit.spec.runspec import PlannedRun
from minicluster.machine import DIR_VARIABLE

Size = dict[str, int]  # nodes, and ranks_per_node
MARK = "JOBKIT_DRILL"  # in the environment of all that a drill starts


def marked(mark: str) -> list[int]:
    """The processes on this machine that carry the mark in their environment."""
    pids, text = [], f"{MARK}={mark}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if text in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                pids.append(int(folder.name))
    return pids


def none_left(mark: str, within_s: float) -> int:
    """Wait until no process with the mark is left; return the number left after the time."""
    deadline = time.monotonic() + within_s
    while (left := len(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def end_marked(mark: str) -> None:
    """Kill every process with the mark."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def signal_ranks(mark: str, number: int, rank: int | None = None) -> int:
    """Signal the processes of one rank, or of all, on this machine; return how many they were.

    A rank's processes are known by RANK. The shell that starts a command as a rank is none of them.
    """
    count = 0
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{pid}")
            variables = (folder / "environ").read_bytes().split(b"\0")
            ranks = [v for v in variables if v.startswith(b"RANK=")]
            wanted = ranks if rank is None else [v for v in ranks if v == b"RANK=%d" % rank]
            if wanted and b"rank_run" not in (folder / "cmdline").read_bytes():
                os.kill(pid, number)
                count += 1
    return count


@dataclass(kw_only=True)
class Started:
    """One start of a run, which run.sh or Slurm may restart.

    begins, ends: when its attempts were seen to begin and to end, in Unix seconds.
    """

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    over: bool = False
    end_text: str = ""  # how it ended, in the launcher's words

    @property
    def took_s(self) -> float:
        """Seconds of its longest attempt, without the time in a queue."""
        pairs = zip(self.begins, self.ends, strict=False)
        return max((end - begin for begin, end in pairs), default=0.0)

    def look(self) -> bool:
        """Update what is known of the start; return whether it is still in progress."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End it."""
        raise NotImplementedError


@dataclass(kw_only=True)
class LocalStart(Started):
    """A run.sh on this machine."""

    child: Children  # never polled, as that would end what it leaves behind, which is counted
    paths: RunPaths
    before: int  # attempts that others have begun

    def look(self) -> bool:
        now, code = time.time(), self.child.codes()[0]
        for _ in range(len(self.paths.attempt_numbers()) - self.before - len(self.begins)):
            if self.begins:
                self.ends.append(now)
            self.begins.append(now)
        if code is not None and not self.over:
            self.over, self.end_text = True, f"ended with exit code {code}"
            self.ends.append(now)
        return not self.over

    def cancel(self) -> None:
        self.child.send(signal.SIGTERM)
        self.child.processes[0].wait()


class LocalPlace:
    """This machine, without Slurm."""

    name, poll_s = "here", 0.1
    sees_processes = True
    size: ClassVar[Size] = {"nodes": 1, "ranks_per_node": 2}

    def start(
        self, spec: PlannedRun, paths: RunPaths, env: Mapping[str, str], again: bool, more: Options
    ) -> Started:
        """Start the run; again: run.sh restarts it once."""
        words = local_command(spec, paths.folder, ["--max-restarts", "1"] if again else [])
        before, child = len(paths.attempt_numbers()), Children(grace_s=0.0)
        environ = {**clean_environment(os.environ), "JOBKIT_PYTHON": sys.executable, **env}
        with paths.log.open("ab") as log:  # in its own session: Ctrl-C is the drill's to answer
            child.start(words, environ, output=log)
        return LocalStart(child=child, paths=paths, before=before)

    def warn(self, started: Started) -> None:
        """Send the stop signal to run.sh."""
        assert isinstance(started, LocalStart)
        started.child.send(signal.SIGUSR2)

    def terminate_ranks(self, started: Started, mark: str) -> None:
        """Send SIGTERM to the ranks only."""
        signal_ranks(mark, signal.SIGTERM)


def compare(reference: Path, runs: list[Path]) -> dict[str, bool | None]:
    """Return, by folder, whether each run's parameters equal the reference's; None: unknown."""
    words = [sys.executable, "-m", "jobkit.checks.compare", str(reference), *map(str, runs)]
    env = {**clean_environment(os.environ), "PYTHONPATH": python_path()}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["run"]: row["same"] for row in rows}


# --- Slurm ---------------------------------------------------------------------------------------

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
            self.over, self.end_text = True, f"Slurm job {self.job_id}: job not found"
            return False
        if state in ("RUNNING", "COMPLETING") or "ExitCode" not in fields:
            self._since = 0.0
        if state == "RUNNING" and len(self.begins) <= int(fields["Restarts"]):
            self.ends += [now] * (len(self.begins) - len(self.ends))
            self.begins.append(now)
            if not self.nodes:  # it is a host list such as n[1-3]
                hosts = slurm(["scontrol", "show", "hostnames", fields["NodeList"]])
                self.nodes = hosts.stdout.split()
        elif state not in ("", "RUNNING") and len(self.ends) < len(self.begins):
            self.ends.append(now)
        if slurm_jobs.STATUS.get(state, "pending") in ("pending", "running"):
            return True
        self._since = self._since or now
        if state not in _REQUEUED or now - self._since > _SETTLED_S:
            self.over, self.end_text = True, f"Slurm job {self.job_id}: {state}"
        return not self.over

    def cancel(self) -> None:
        slurm(["scancel", self.job_id])


class SlurmPlace:
    """A cluster, or a minicluster, all of whose processes are on this machine."""

    name = "slurm"
    size: ClassVar[Size] = {"nodes": 2, "ranks_per_node": 1}

    def __init__(self, site: Site, options: Options, urgent: str | None) -> None:
        """options: sbatch's, for every job. urgent: a partition that preempts others' jobs."""
        self.site, self.options = site, options
        folder = os.environ.get(DIR_VARIABLE)
        self.sees_processes = bool(folder) and Path(str(folder)).is_dir()
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
        words = [f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items()]
        write_whole(paths.site, self.site.shell())
        words = ["sbatch", "--parsable", *words, str(RUN_SH), *job_command(spec, paths, False)[2:]]
        variables = {"JOBKIT_ROOT": str(REPOSITORY), "JOBKIT_PYTHON": sys.executable}
        done = slurm(words, **variables, **env)
        if done.returncode:
            raise UsageError(refusal(done.stderr, options))
        return SlurmStart(job_id=done.stdout.strip().split(";")[0])

    def _options(self, spec: PlannedRun, paths: RunPaths, more: Options) -> Options:
        shape = Shape(spec.nodes, spec.ranks_per_node)
        asked_for = {"time": "10", **self.options, **more}
        options = sbatch_options(shape, self.site, asked_for, f"drill-{paths.folder.name}")
        log = output_file(paths.log)
        return {**options, **warning(options, spec.stop_signal), "output": log, "error": log}

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
        site = {"account": self.site.account, "qos": self.site.qos}
        options = {**site, **verbatim(self.site.sbatch), **self.options}
        words += [f"--{key}={options[key]}" for key in site if options[key]]
        done = slurm([*words, "--time=1", "--wrap", "sleep 2"])
        return done.stderr.strip() or "sbatch failed" if done.returncode else ""


def first_row(job_id: str) -> slurm_jobs.Job | None:
    """What sacct says of a job's first start; None where it says nothing, or that it was requeued
    at the job's own request.
    """
    words = ["sacct", "-D", "-X", "-P", "-n", "-j", job_id, "-o", slurm_jobs.SACCT]
    shown = slurm(words).stdout
    for line in shown.splitlines()[:1]:
        job = slurm_jobs.read_sacct(line).get(job_id)
        return job if job and job.status not in ("pending", "running") else None
    return None
