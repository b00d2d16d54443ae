"""The faults of a drill: how each is injected, what comes before and after, what it needs."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from jobkit.drill.fault import FaultCase, RunUnderFault
from jobkit.paths import RunPaths

TIME_LIMIT_MIN = 2  # in one, Slurm's shortest, a busy machine does not come to the fault


def _warn(run: RunUnderFault) -> None:
    run.place.warn(run.started)


def _terminate(run: RunUnderFault) -> None:
    run.place.terminate_ranks(run.started, run.mark)


def _cancel(run: RunUnderFault) -> None:
    run.started.cancel()


def _time_limit(run: RunUnderFault) -> None:
    run.injected_at = run.started.begins[0] + 60 * TIME_LIMIT_MIN


def _let_go(run: RunUnderFault) -> None:
    """Release the rank that pauses."""
    run.paths.fault_marker(0).unlink(missing_ok=True)


# --- nodes, daemons, links ------------------------------------------------------------------------


def _preempt(run: RunUnderFault) -> None:
    run.preempt()


def _kill_slurmd(run: RunUnderFault) -> None:
    run.minicluster.do("kill", run.target())


def _kill_node(run: RunUnderFault) -> None:
    run.minicluster.do("kill", run.target(), "--jobs")
    _let_go(run)  # the rank that is left finds out for itself


def _start_node(run: RunUnderFault) -> None:
    for node in run.nodes()[-1:]:
        run.minicluster.do("start", node)


def _cut(run: RunUnderFault) -> None:
    run.minicluster.do("link", "cut", run.target())
    _let_go(run)


def _heal(run: RunUnderFault) -> None:
    for node in run.nodes()[-1:]:
        run.minicluster.do("link", "heal", node)


def _kill_controller(run: RunUnderFault) -> None:
    """The run ends while slurmctld is away; of what that had not saved it would know nothing."""
    begun = run.started.begins[0]
    run.wait("slurmctld's state is saved", lambda: run.minicluster.saved_at > begun)
    run.minicluster.do("kill", "slurmctld")
    _let_go(run)
    run.wait("the run's end", run.paths.outcome(0).exists)
    time.sleep(1)
    _start_controller(run)


def _start_controller(run: RunUnderFault) -> None:
    run.minicluster.do("start", "slurmctld")


# --- disks ----------------------------------------------------------------------------------------


def newest_checkpoint(paths: RunPaths) -> Path:
    """The folder of a run's newest checkpoint."""
    return max(paths.checkpoints.glob("[0-9]*-*"), key=lambda path: path.name)


def _largest_file(run: RunUnderFault) -> Path:
    return max(newest_checkpoint(run.paths).glob("*.distcp"), key=lambda p: p.stat().st_size)


def _cut_short(run: RunUnderFault) -> None:
    file = _largest_file(run)
    os.truncate(file, file.stat().st_size // 2)


def _flip_bit(run: RunUnderFault) -> None:
    file = _largest_file(run)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x10]))


def _small_disk(run: RunUnderFault) -> None:
    """A file system with room for one checkpoint and a half."""
    run.paths.checkpoints.mkdir()
    _mount(run, "tmpfs", "--types=tmpfs", f"--options=size={run.checkpoint_bytes * 3 // 2}")


def _larger_disk(run: RunUnderFault) -> None:
    _mount(run, f"--options=remount,size={run.checkpoint_bytes * 10}")


def _mount(run: RunUnderFault, *words: str) -> None:
    command = ["mount", *words, str(run.paths.checkpoints)]
    done = _inside(run, command)
    run.check(done.returncode == 0, f"mount: {done.stderr.strip()}")


def _inside(run: RunUnderFault, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command among the mounts that the ranks see."""
    inside = ["nsenter", f"--target={run.namespace()}", "--mount"]
    return subprocess.run([*inside, *command], capture_output=True, text=True)


def _keep_and_unmount(run: RunUnderFault) -> None:
    """Bring what lies on the small disk to where the run's folder is."""
    seen = RunPaths(Path(f"/proc/{run.namespace()}/root{run.paths.folder}"))
    aside = run.paths.folder / "aside"
    if any(seen.checkpoints.glob("[0-9]*-*")):
        shutil.copytree(newest_checkpoint(seen), aside)
        name = newest_checkpoint(seen).name
    _inside(run, ["umount", str(run.paths.checkpoints)])
    if aside.exists():
        aside.rename(run.paths.checkpoints / name)


ANYWHERE = ("slurm", "here")
_FAILED = ("failed",)
# Time-out of a collective whose rank does not come, in seconds.
_IMPATIENT: dict[str, object] = {"timeout_s": 20.0}
FAULTS: dict[str, FaultCase] = {
    fault.name: fault
    for fault in (
        FaultCase(
            name="kill",
            text="a rank is killed (SIGKILL)",
            first=_FAILED,
            kind="kill",
            where=ANYWHERE,
        ),
        FaultCase(
            name="raise",
            text="a rank raises an exception",
            first=_FAILED,
            kind="raise",
            where=ANYWHERE,
        ),
        FaultCase(
            name="hang",
            text="a rank hangs; --timeout-s 20",
            first=_FAILED,
            kind="hang",
            where=ANYWHERE,
            settings=_IMPATIENT,
        ),
        FaultCase(
            name="warning",
            text="USR2, the warning before a time limit",
            first=("preempted",),
            where=ANYWHERE,
            inject=_warn,
        ),
        FaultCase(
            name="term",
            text="TERM to the ranks (Slurm: to the step)",
            first=("preempted",),
            where=ANYWHERE,
            inject=_terminate,
        ),
        FaultCase(name="scancel", text="scancel", first=("cancelled",), inject=_cancel),
        FaultCase(
            name="time-limit",
            text=f"the time limit, of {TIME_LIMIT_MIN} minutes",
            first=("timeout",),
            lane="slow",
            options={"time": str(TIME_LIMIT_MIN)},
            inject=_time_limit,
        ),
        FaultCase(
            name="preemption",
            text="a job of a higher partition takes the nodes",
            first=("preempted",),
            needs="urgent",
            lane="nodes",
            options={"exclusive": True},
            inject=_preempt,
        ),
        FaultCase(
            name="slurmd",
            text="a node's slurmd is killed, the attempt on it lives on",
            first=("node_fail",),
            needs="minicluster",
            lane="nodes",
            one_node=True,
            inject=_kill_slurmd,
            later=_let_go,
            after=_start_node,
        ),
        FaultCase(
            name="node",
            text="a node is lost with all that runs on it",
            first=("node_fail", "failed"),
            needs="minicluster",
            lane="nodes",
            inject=_kill_node,
            after=_start_node,
        ),
        FaultCase(
            name="link",
            text="a node's link is cut; --timeout-s 20",
            first=("node_fail", "failed"),
            needs="links",
            lane="nodes",
            settings=_IMPATIENT,
            inject=_cut,
            after=_heal,
        ),
        FaultCase(
            name="disk-full",
            text="the disk is full during a checkpoint, then a rank is killed",
            first=_FAILED,
            kind="kill",
            where=ANYWHERE,
            needs="root",
            one_node=True,
            options={"nodelist": "n1"},
            before=_small_disk,
            between=_larger_disk,
            after=_keep_and_unmount,
        ),
        FaultCase(
            name="cut-short",
            text="a rank is killed, the newest checkpoint cut short",
            first=_FAILED,
            kind="kill",
            where=ANYWHERE,
            between=_cut_short,
        ),
        FaultCase(
            name="bit-flip",
            text="a rank is killed, a bit of the newest checkpoint flipped",
            first=_FAILED,
            kind="kill",
            where=ANYWHERE,
            between=_flip_bit,
        ),
        FaultCase(
            name="slurmctld",
            text="slurmctld is killed, and back when the run has ended",
            first=("ok",),
            needs="minicluster",
            lane="alone",
            inject=_kill_controller,
            after=_start_controller,
        ),
    )
}
NODE_FAULTS = [fault.name for fault in FAULTS.values() if fault.lane == "nodes"]
WIDE = 2 + 3 * len(NODE_FAULTS)  # nodes of a minicluster on which they need not wait for another
