"""The places where a drill runs: this machine, or a Slurm cluster."""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

from jobkit.errors import UsageError
from jobkit.launch import slurm_options
from jobkit.launch.command import RUN_SH, clean_environment, job_command, local_command
from jobkit.launch.site import Site
from jobkit.launch.slurm_cluster import call, refusal
from jobkit.launch.slurm_options import Options, sbatch_options, verbatim
from jobkit.outcome import slurm_jobs
from jobkit.paths import REPOSITORY, RunPaths, write_whole
from jobkit.processes import Children, environments
from jobkit.spec.command import PlannedRun
from minicluster.machine import DIR_VARIABLE

Size = dict[str, int]  # nodes, and ranks_per_node
MARK = "JOBKIT_DRILL"  # in the environment of all that a drill starts


def signal_marked(mark: str, number: int, ranks: Sequence[str] = ()) -> int:
    """Signal the processes of this machine that carry the mark, all or of ranks; return how many.

    Number 0 is no signal, and only counts them.
    """
    count = 0
    for pid, variables in environments():
        if variables.get(MARK) == mark and (not ranks or variables.get("RANK") in ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                count += 1
    return count


def end_marked(mark: str, within_s: float) -> int:
    """Wait for the end of all processes with the mark; kill, and count, what is left by then."""
    deadline = time.monotonic() + within_s
    while signal_marked(mark, 0) and time.monotonic() < deadline:
        time.sleep(0.2)
    return signal_marked(mark, signal.SIGKILL)


@dataclass(kw_only=True)
class Started:
    """One start of a run, which jobkit or Slurm may requeue.

    begins, ends: when its attempts were seen to begin and to end, in Unix seconds. Each kind has
    look, which updates what is known and returns whether it is still in progress; warn, the signal
    that Slurm sends before a time limit; terminate_ranks, SIGTERM to them alone; and cancel.
    """

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)  # on Slurm, of its first attempt
    over: bool = False
    end_text: str = ""  # how it ended, in the launcher's words

    @property
    def took_s(self) -> float:
        """Seconds of its longest attempt, without the time in a queue."""
        pairs = zip(self.begins, self.ends, strict=False)
        return max((end - begin for begin, end in pairs), default=0.0)

    def accounted(self) -> slurm_jobs.Job | None:
        """What Slurm's accounting says of its first attempt."""
        return None


# --- this machine --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class LocalStart(Started):
    """A run.sh on this machine."""

    child: Children  # never polled, as that would end what it leaves behind, which is counted

    def look(self) -> bool:
        code = self.child.codes()[0]
        if code is not None and not self.over:
            self.over, self.end_text = True, f"ended with exit code {code}"
            self.ends.append(time.time())
        return not self.over

    def warn(self) -> None:
        self.child.send(signal.SIGUSR2)

    def terminate_ranks(self, mark: str) -> None:
        signal_marked(mark, signal.SIGTERM, ("0", "1"))

    def cancel(self) -> None:
        self.child.send(signal.SIGTERM)
        self.child.processes[0].wait()


class LocalPlace:
    """This machine, without Slurm."""

    name, poll_s, size = "here", 0.1, {"nodes": 1, "ranks_per_node": 2}
    sees_processes, urgent = True, None

    def start(
        self, spec: PlannedRun, paths: RunPaths, env: Mapping[str, str], _: Options
    ) -> LocalStart:
        child = Children(grace_s=0.0)
        environ = {**clean_environment(os.environ), "JOBKIT_PYTHON": sys.executable, **env}
        with paths.log.open("ab") as log:  # in its own session: Ctrl-C is the drill's to answer
            child.start(local_command(spec, paths.folder), environ, output=log)
        return LocalStart(child=child, begins=[time.time()])


# --- Slurm ---------------------------------------------------------------------------------------

_SETTLED_S = 3.0  # a job that Slurm requeues shows a final state for a moment
_REQUEUED = ("NODE_FAIL", "PREEMPTED")


def slurm(words: list[str], **env: str) -> "CompletedProcess[str]":
    """Call a Slurm command with additional environment variables, which a job inherits."""
    return call(["env", *(f"{k}={v}" for k, v in env.items()), *words])


@dataclass(kw_only=True)
class SlurmStart(Started):
    job_id: str
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

    def warn(self) -> None:
        slurm(["scancel", "--signal=USR2", self.job_id])

    def terminate_ranks(self, _: str) -> None:
        slurm(["scancel", "--signal=TERM", self.job_id])

    def cancel(self) -> None:
        slurm(["scancel", self.job_id])

    def accounted(self) -> slurm_jobs.Job | None:
        """None also where it was requeued at its own request."""
        words = ["sacct", "-D", "-X", "-P", "-n", "-j", self.job_id, "-o", slurm_jobs.SACCT]
        job = slurm_jobs.read_sacct(slurm(words).stdout.partition("\n")[0]).get(self.job_id)
        return job if job and job.status not in ("pending", "running") else None


class SlurmPlace:
    """A cluster, or a minicluster, all of whose processes are on this machine."""

    name, size = "slurm", {"nodes": 2, "ranks_per_node": 1}

    def __init__(self, site: Site, options: Options, urgent: str | None) -> None:
        """options: sbatch's, for every job. urgent: a partition that preempts others' jobs."""
        self.site, self.options = site, options
        self.sees_processes = Path(os.environ.get(DIR_VARIABLE) or "/nonexistent").is_dir()
        self.poll_s = 0.8 if self.sees_processes else 5.0  # a controller has other users
        names = slurm(["sinfo", "-h", "-o", "%R"]) if self.sees_processes else None
        partitions = names.stdout.split() if names else []
        self.urgent = urgent or ("urgent" if "urgent" in partitions else None)

    def start(
        self, spec: PlannedRun, paths: RunPaths, env: Mapping[str, str], more: Options
    ) -> SlurmStart:
        """Submit the run; jobkit or Slurm may requeue it. Raises UsageError when it is refused."""
        shape = slurm_options.Shape(spec.nodes, spec.ranks_per_node)
        name = f"drill-{paths.folder.name}"
        options = sbatch_options(shape, self.site, {**self.options, **more}, name)
        log = str(paths.log).replace("%", "%%")  # else Slurm would replace %j and others
        options |= {**slurm_options.warning(options), "output": log, "error": log}
        words = [f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items()]
        write_whole(paths.site, self.site.shell())
        words = ["sbatch", "--parsable", *words, str(RUN_SH), *job_command(spec, paths, False)[2:]]
        variables = {"JOBKIT_ROOT": str(REPOSITORY), "JOBKIT_PYTHON": sys.executable}
        done = slurm(words, **variables, **env)
        if done.returncode:
            raise UsageError(refusal(done.stderr, options))
        return SlurmStart(job_id=done.stdout.strip().split(";")[0])

    def preempt(self, nodes: list[str]) -> None:
        """Submit a job that preempts those on the nodes. Raises UsageError where it is refused."""
        words = ["sbatch", f"--partition={self.urgent}", f"--nodes={len(nodes)}", "--exclusive"]
        words += [f"--nodelist={','.join(nodes)}", "--output=/dev/null", "--job-name=drill-urgent"]
        site = {"account": self.site.account, "qos": self.site.qos}
        options = {**site, **verbatim(self.site.sbatch), **self.options}
        words += [f"--{key}={options[key]}" for key in site if options[key]]
        done = slurm([*words, "--time=1", "--wrap", "sleep 2"])
        if done.returncode:
            raise UsageError(f"the preempting job was refused: {done.stderr.strip()}")


Place = LocalPlace | SlurmPlace
Start = LocalStart | SlurmStart
