"""The faults of a drill: how each strikes, what comes before and after, what it needs."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.launch.slurm.options import Options
from jobkit.paths import RunPaths

if TYPE_CHECKING:
    from jobkit.drill.course import Course

Act = Callable[["Course"], None]
TIME_LIMIT_MIN = 2  # in one, Slurm's shortest, a busy machine does not come to the fault
# What strikes a node needs it for itself, slurmctld all; a time limit is mostly waiting.
LANES = ("shared", "slow", "nodes", "alone")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and what is known of it beforehand."""

    name: str
    text: str  # what happens
    first: tuple[str, ...]  # the true statuses of the attempt that it strikes
    plant: str = "hold"  # JOBKIT_FAULT's kind
    where: tuple[str, ...] = ("slurm",)
    needs: str = ""  # minicluster, links, root, urgent
    lane: str = "shared"
    one_node: bool = False  # both ranks on one node
    settings: dict[str, object] = field(default_factory=dict)  # beside the drill's own
    options: Options = field(default_factory=dict)  # of sbatch, for the first start
    before: Act | None = None  # before the first start
    strike: Act | None = None  # from outside, once the rank holds still
    later: Act | None = None  # once the next attempt has begun
    between: Act | None = None  # before it is started again
    after: Act | None = None  # in the end, whatever became of it


def _warn(course: "Course") -> None:
    course.place.warn(course.started)


def _terminate(course: "Course") -> None:
    course.place.terminate_ranks(course.started, course.mark)


def _cancel(course: "Course") -> None:
    course.started.cancel()


def _time_limit(course: "Course") -> None:
    course.struck_at = course.started.begins[0] + 60 * TIME_LIMIT_MIN


def _let_go(course: "Course") -> None:
    """The rank that holds still goes on."""
    course.paths.fault_marker(0).unlink(missing_ok=True)


# --- nodes, daemons, links ------------------------------------------------------------------------


def _preempt(course: "Course") -> None:
    from jobkit.drill.slurm import slurm

    nodes = course.nodes()
    words = ["sbatch", "--partition", course.urgent, "--nodes", str(len(nodes)), "--exclusive"]
    words += ["--nodelist", ",".join(nodes), "--output=/dev/null", "--job-name=drill-urgent"]
    done = slurm([*words, "--time=1", "--wrap", "sleep 2"])
    course.check(done.returncode == 0, f"no urgent job: {done.stderr.strip()}")


def _kill_slurmd(course: "Course") -> None:
    course.minicluster.do("kill", course.victim())


def _kill_node(course: "Course") -> None:
    course.minicluster.do("kill", course.victim(), "--jobs")
    _let_go(course)  # the rank that is left finds out for itself


def _start_node(course: "Course") -> None:
    for node in course.nodes()[-1:]:
        course.minicluster.do("start", node)


def _cut(course: "Course") -> None:
    course.minicluster.do("link", "cut", course.victim())
    _let_go(course)


def _heal(course: "Course") -> None:
    for node in course.nodes()[-1:]:
        course.minicluster.do("link", "heal", node)


def _kill_controller(course: "Course") -> None:
    """The run ends while slurmctld is away; of what that had not saved it would know nothing."""
    begun = course.started.begins[0]
    course.wait("slurmctld's state is saved", lambda: course.minicluster.saved_at > begun)
    course.minicluster.do("kill", "slurmctld")
    _let_go(course)
    course.wait("the run's end", course.paths.outcome(0).exists)
    time.sleep(1)
    _start_controller(course)


def _start_controller(course: "Course") -> None:
    course.minicluster.do("start", "slurmctld")


# --- disks ----------------------------------------------------------------------------------------


def newest_checkpoint(paths: RunPaths) -> Path:
    """The folder of a run's newest checkpoint."""
    return max(paths.checkpoints.glob("[0-9]*-*"), key=lambda path: path.name)


def _largest_file(course: "Course") -> Path:
    return max(newest_checkpoint(course.paths).glob("*.distcp"), key=lambda p: p.stat().st_size)


def _cut_short(course: "Course") -> None:
    file = _largest_file(course)
    os.truncate(file, file.stat().st_size // 2)


def _flip_bit(course: "Course") -> None:
    file = _largest_file(course)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x10]))


def _small_disk(course: "Course") -> None:
    """A file system with room for one checkpoint and a half."""
    course.paths.checkpoints.mkdir()
    _mount(course, "tmpfs", "--types=tmpfs", f"--options=size={course.checkpoint_bytes * 3 // 2}")


def _larger_disk(course: "Course") -> None:
    _mount(course, f"--options=remount,size={course.checkpoint_bytes * 10}")


def _mount(course: "Course", *words: str) -> None:
    command = ["mount", *words, str(course.paths.checkpoints)]
    done = _inside(course, command)
    course.check(done.returncode == 0, f"mount: {done.stderr.strip()}")


def _inside(course: "Course", command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command among the mounts that the ranks see."""
    inside = ["nsenter", f"--target={course.namespace()}", "--mount"]
    return subprocess.run([*inside, *command], capture_output=True, text=True)


def _keep_and_unmount(course: "Course") -> None:
    """Bring what lies on the small disk to where the run's folder is."""
    seen = RunPaths(Path(f"/proc/{course.namespace()}/root{course.paths.folder}"))
    aside = course.paths.folder / "aside"
    if any(seen.checkpoints.glob("[0-9]*-*")):
        shutil.copytree(newest_checkpoint(seen), aside)
        name = newest_checkpoint(seen).name
    _inside(course, ["umount", str(course.paths.checkpoints)])
    if aside.exists():
        aside.rename(course.paths.checkpoints / name)


ANYWHERE = ("slurm", "here")
_FAILED = ("failed",)
# A collective that waits for a rank for ever is given up after so long.
_IMPATIENT: dict[str, object] = {"timeout_s": 20.0}
FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="kill",
            text="a rank is killed (SIGKILL)",
            first=_FAILED,
            plant="kill",
            where=ANYWHERE,
        ),
        Fault(
            name="raise",
            text="a rank raises an exception",
            first=_FAILED,
            plant="raise",
            where=ANYWHERE,
        ),
        Fault(
            name="hang",
            text="a rank hangs; --timeout-s 20",
            first=_FAILED,
            plant="hang",
            where=ANYWHERE,
            settings=_IMPATIENT,
        ),
        Fault(
            name="warning",
            text="USR2, the warning before a time limit",
            first=("preempted",),
            where=ANYWHERE,
            strike=_warn,
        ),
        Fault(
            name="term",
            text="TERM to the ranks (Slurm: to the step)",
            first=("preempted",),
            where=ANYWHERE,
            strike=_terminate,
        ),
        Fault(name="scancel", text="scancel", first=("cancelled",), strike=_cancel),
        Fault(
            name="time-limit",
            text=f"the time limit, of {TIME_LIMIT_MIN} minutes",
            first=("timeout",),
            lane="slow",
            options={"time": str(TIME_LIMIT_MIN)},
            strike=_time_limit,
        ),
        Fault(
            name="preemption",
            text="a job of a higher partition takes the nodes",
            first=("preempted",),
            needs="urgent",
            lane="nodes",
            options={"exclusive": True},
            strike=_preempt,
        ),
        Fault(
            name="slurmd",
            text="a node's slurmd is killed, the attempt on it lives on",
            first=("node_fail",),
            needs="minicluster",
            lane="nodes",
            one_node=True,
            strike=_kill_slurmd,
            later=_let_go,
            after=_start_node,
        ),
        Fault(
            name="node",
            text="a node is lost with all that runs on it",
            first=("node_fail", "failed"),
            needs="minicluster",
            lane="nodes",
            strike=_kill_node,
            after=_start_node,
        ),
        Fault(
            name="link",
            text="a node's link is cut; --timeout-s 20",
            first=("node_fail", "failed"),
            needs="links",
            lane="nodes",
            settings=_IMPATIENT,
            strike=_cut,
            after=_heal,
        ),
        Fault(
            name="disk-full",
            text="the disk is full during a checkpoint, then a rank is killed",
            first=_FAILED,
            plant="kill",
            where=ANYWHERE,
            needs="root",
            one_node=True,
            options={"nodelist": "n1"},
            before=_small_disk,
            between=_larger_disk,
            after=_keep_and_unmount,
        ),
        Fault(
            name="cut-short",
            text="a rank is killed, the newest checkpoint cut short",
            first=_FAILED,
            plant="kill",
            where=ANYWHERE,
            between=_cut_short,
        ),
        Fault(
            name="bit-flip",
            text="a rank is killed, a bit of the newest checkpoint flipped",
            first=_FAILED,
            plant="kill",
            where=ANYWHERE,
            between=_flip_bit,
        ),
        Fault(
            name="slurmctld",
            text="slurmctld is killed, and back when the run has ended",
            first=("ok",),
            needs="minicluster",
            lane="alone",
            strike=_kill_controller,
            after=_start_controller,
        ),
    )
}
NODE_FAULTS = [fault.name for fault in FAULTS.values() if fault.lane == "nodes"]
WIDE = 2 + 3 * len(NODE_FAULTS)  # nodes of a minicluster on which they need not wait for another
