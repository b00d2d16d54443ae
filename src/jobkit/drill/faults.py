"""The table of faults: the injection of each, the actions around it, and its requirements."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from jobkit.drill.fault import Act, FaultCase, RunUnderFault
from jobkit.paths import RunPaths

TIME_LIMIT_MIN = 2  # with one, Slurm's shortest, a loaded machine does not reach the injection


def _warn(run: RunUnderFault) -> None:
    run.place.warn(run.started)


def _terminate(run: RunUnderFault) -> None:
    run.place.terminate_ranks(run.started, run.mark)


def _cancel(run: RunUnderFault) -> None:
    run.started.cancel()


def time_limit(minutes: int) -> Act:
    """The action that waits for the time limit of a job."""

    def act(run: RunUnderFault) -> None:
        run.injected_at = run.started.begins[0] + 60 * minutes

    return act


def _release(run: RunUnderFault) -> None:
    """Release the paused rank."""
    run.paths.fault_marker(0).unlink(missing_ok=True)


# --- nodes, daemons, links ------------------------------------------------------------------------


def _preempt(run: RunUnderFault) -> None:
    run.preempt()


def _kill_slurmd(run: RunUnderFault) -> None:
    run.minicluster.do("kill", run.target())


def _kill_node(run: RunUnderFault) -> None:
    run.minicluster.do("kill", run.target(), "--jobs")
    _release(run)  # the remaining rank has to detect the loss


def _start_node(run: RunUnderFault) -> None:
    for node in run.nodes()[-1:]:
        run.minicluster.do("start", node)


def _cut_link(run: RunUnderFault) -> None:
    run.minicluster.do("link", "cut", run.target())
    _release(run)


def _heal_link(run: RunUnderFault) -> None:
    for node in run.nodes()[-1:]:
        run.minicluster.do("link", "heal", node)


def _kill_controller(run: RunUnderFault) -> None:
    """Kill slurmctld once it has saved the job's state, and restart it after the run's end."""
    begun = run.started.begins[0]
    run.wait("slurmctld's state is saved", lambda: run.minicluster.saved_at > begun)
    run.check(run.started.look(), "the run ended before slurmctld had saved its state")
    run.minicluster.do("kill", "slurmctld")
    _release(run)
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


def _truncate(run: RunUnderFault) -> None:
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
    """Mount a file system of one and a half checkpoints for the run's checkpoints."""
    run.paths.checkpoints.mkdir()
    _mount(run, "tmpfs", "--types=tmpfs", f"--options=size={run.checkpoint_bytes * 3 // 2}")


def _larger_disk(run: RunUnderFault) -> None:
    _mount(run, f"--options=remount,size={run.checkpoint_bytes * 10}")


def _mount(run: RunUnderFault, *words: str) -> None:
    command = ["mount", *words, str(run.paths.checkpoints)]
    done = _in_namespace(run, command)
    run.check(done.returncode == 0, f"mount: {done.stderr.strip()}")


def _in_namespace(run: RunUnderFault, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the mount namespace of the ranks."""
    inside = ["nsenter", f"--target={run.namespace()}", "--mount"]
    return subprocess.run([*inside, *command], capture_output=True, text=True)


def _save_and_unmount(run: RunUnderFault) -> None:
    """Copy the newest checkpoint from the small disk into the run's folder; unmount it."""
    seen = RunPaths(Path(f"/proc/{run.namespace()}/root{run.paths.folder}"))
    aside = run.paths.folder / "aside"
    if any(seen.checkpoints.glob("[0-9]*-*")):
        shutil.copytree(newest_checkpoint(seen), aside)
        name = newest_checkpoint(seen).name
    _in_namespace(run, ["umount", str(run.paths.checkpoints)])
    if aside.exists():
        aside.rename(run.paths.checkpoints / name)


ANYWHERE = ("slurm", "here")
_FAILED = ("failed",)
# Timeout of a collective that a rank does not join, in seconds.
_SHORT_TIMEOUT: dict[str, object] = {"timeout_s": 60.0}
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
            text="a rank hangs; --timeout-s 60",
            first=_FAILED,
            kind="hang",
            where=ANYWHERE,
            settings=_SHORT_TIMEOUT,
        ),
        FaultCase(
            name="warning",
            text="USR2, the warning signal before a time limit",
            first=("preempted",),
            where=ANYWHERE,
            inject=_warn,
        ),
        FaultCase(
            name="term",
            text="SIGTERM to the ranks (on Slurm: to the job step)",
            first=("preempted",),
            where=ANYWHERE,
            inject=_terminate,
        ),
        FaultCase(
            name="scancel",
            text="the job is cancelled with scancel",
            first=("cancelled",),
            inject=_cancel,
        ),
        FaultCase(
            name="time-limit",
            text=f"the time limit ({TIME_LIMIT_MIN} minutes) is reached",
            first=("timeout",),
            lane="slow",
            options={"time": str(TIME_LIMIT_MIN)},
            inject=time_limit(TIME_LIMIT_MIN),
        ),
        FaultCase(
            name="preemption",
            text="a job of a partition with higher priority preempts the run",
            first=("preempted",),
            needs="urgent",
            lane="nodes",
            options={"exclusive": True},
            inject=_preempt,
        ),
        FaultCase(
            name="slurmd",
            text="a node's slurmd is killed; the attempt on it continues",
            first=("node_fail",),
            needs="minicluster",
            lane="nodes",
            one_node=True,
            inject=_kill_slurmd,
            later=_release,
            after=_start_node,
        ),
        FaultCase(
            name="node",
            text="a node fails with all its processes",
            first=("node_fail", "failed"),
            needs="minicluster",
            lane="nodes",
            inject=_kill_node,
            after=_start_node,
        ),
        FaultCase(
            name="link",
            text="a node's network link goes down; --timeout-s 60",
            first=("node_fail", "failed"),
            needs="links",
            lane="nodes",
            settings=_SHORT_TIMEOUT,
            inject=_cut_link,
            after=_heal_link,
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
            after=_save_and_unmount,
        ),
        FaultCase(
            name="cut-short",
            text="a rank is killed, the newest checkpoint is truncated",
            first=_FAILED,
            kind="kill",
            where=ANYWHERE,
            between=_truncate,
        ),
        FaultCase(
            name="bit-flip",
            text="a rank is killed, one bit of the newest checkpoint is flipped",
            first=_FAILED,
            kind="kill",
            where=ANYWHERE,
            between=_flip_bit,
        ),
        FaultCase(
            name="slurmctld",
            text="slurmctld is killed, and restarted after the end of the run",
            first=("ok",),
            needs="minicluster",
            lane="alone",
            inject=_kill_controller,
            after=_start_controller,
        ),
    )
}
NODE_FAULTS = [fault.name for fault in FAULTS.values() if fault.lane == "nodes"]
WIDE = 2 + 3 * len(
    NODE_FAULTS
)  # nodes of a minicluster on which the node faults can run at the same time
