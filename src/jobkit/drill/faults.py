"""The faults of a drill: how each is injected, what it needs, and the expected status."""

from dataclasses import dataclass, field

from jobkit.launch.slurm_options import Options

TIME_LIMIT_MIN = 2  # with one, Slurm's shortest, a loaded machine does not reach the injection


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    """One fault: how it is injected, what it needs, and the expected status."""

    name: str
    text: str  # what happens
    first: tuple[str, ...]  # the accepted statuses of the attempt that it hits
    kind: str = "hold"  # JOBKIT_FAULT's: what the payload does to itself; hold: it pauses
    where: tuple[str, ...] = ("slurm", "here")
    needs: str = ""  # urgent: a partition that preempts; processes: of the ranks, on this machine
    settings: dict[str, object] = field(default_factory=dict)  # beside the drill's own
    options: Options = field(default_factory=dict)  # of sbatch, for the first start
    action: str = ""  # from outside, once the rank pauses: FaultRun.inject


_FAILED = ("failed",)
FAULTS: dict[str, FaultCase] = {
    fault.name: fault
    for fault in (
        FaultCase(name="kill", text="a rank is killed (SIGKILL)", first=_FAILED, kind="kill"),
        FaultCase(name="raise", text="a rank raises an exception", first=_FAILED, kind="raise"),
        FaultCase(
            name="hang",
            text="a rank hangs; --timeout-s 60",
            first=_FAILED,
            kind="hang",
            settings={"timeout_s": 60.0},  # of a collective that a rank does not join
        ),
        FaultCase(
            name="warning",
            text="USR2, the warning signal before a time limit",
            first=("preempted",),
            action="warn",
        ),
        FaultCase(
            name="term",
            text="SIGTERM to the ranks (on Slurm: to the job step)",
            first=("preempted",),
            action="term",
        ),
        FaultCase(
            name="scancel",
            text="the job is cancelled with scancel",
            first=("cancelled",),
            where=("slurm",),
            action="cancel",
        ),
        FaultCase(
            name="time-limit",
            text=f"the time limit ({TIME_LIMIT_MIN} minutes) is reached",
            first=("timeout",),
            where=("slurm",),
            options={"time": str(TIME_LIMIT_MIN)},
            action="limit",
        ),
        FaultCase(
            name="preemption",
            text="a job of a partition with higher priority preempts the run",
            first=("preempted",),
            where=("slurm",),
            needs="urgent",
            options={"exclusive": True},
            action="preempt",
        ),
    )
}
