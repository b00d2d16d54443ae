"""launch(plan): start what is missing, and a handle on it."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jobkit.dataset import check_source
from jobkit.errors import UsageError
from jobkit.launch.command import Order
from jobkit.paths import StudyPaths, read_json
from jobkit.plan import Plan
from jobkit.status import RunState, is_alive, process_start, run_state

FINAL = ("ok", "failed", "oom", "timeout", "preempted", "cancelled", "node_fail")
UNDER_WAY = ("running", "pending")
_POLL_S = 0.25


def launch(plan: Plan, *, at_once: int = 1, detach: bool = False) -> "Launch":
    """Save the plan and start its runs that are missing or failed, at_once of them at a time.

    Returns at once; the runs are started by a process of their own, which ends with this one
    unless detach is set. Raises UsageError for a plan that cannot run here.
    """
    check(plan)
    paths = plan.paths
    plan = replace(plan, notes=(*plan.notes, *warnings(plan)))
    save(plan)
    run_ids = to_start(plan)
    order = Order(
        folder=str(paths.folder),
        run_ids=run_ids,
        at_once=at_once,
        parent=None if detach else os.getpid(),
    )
    driver = _start_driver(paths, order)
    return Launch(plan=plan, run_ids=run_ids, driver=driver, at_once=at_once)


def check(plan: Plan) -> None:
    """Raise UsageError for a plan that cannot run on this machine."""
    for package in ("torch", "torchvision", "submitit"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"the package '{package}' is not installed for {sys.executable}: "
                "run 'make venv' once, then 'source .venv/bin/activate'"
            )
    for dataset in {spec.dataset for spec in plan.runs.values()}:
        check_source(dataset)
    for spec in plan.runs.values():
        if spec.nodes > 1:
            raise UsageError(
                f"{spec.nodes} nodes: this machine is one; plan it with "
                f"--gpus {spec.world_size}, or run it where Slurm is"
            )


def save(plan: Plan) -> None:
    """Write plan.json; UsageError where that cannot be."""
    try:
        plan.save()
    except OSError as error:
        raise UsageError(
            f"{plan.paths.folder}: cannot be written ({error.strerror}); "
            "choose another place for logs with JOBKIT_LOGS"
        ) from None


def warnings(plan: Plan) -> list[str]:
    """What a reader of the results should know of this machine before the runs start."""
    largest = max(spec.world_size for spec in plan.runs.values())
    cores, gpus = len(os.sched_getaffinity(0)), gpus_here()
    on_cpu = not gpus or any(spec.device == "cpu" for spec in plan.runs.values())
    found = []
    if on_cpu and largest > cores:
        found.append(f"up to {largest} ranks share {cores} cores: their times will not scale")
    if gpus and largest > gpus:
        found.append(f"up to {largest} ranks share {gpus} GPUs: their times will not scale")
    return found


def gpus_here() -> int:
    """GPUs of this machine, found without torch."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listed.stdout.count("GPU ")


def to_start(plan: Plan) -> list[str]:
    """The runs that are missing or did not end well, in the plan's order."""
    now = states(plan)
    return [r for r in plan.runs if now[r].status != "ok" and now[r].status not in UNDER_WAY]


def states(plan: Plan, known: dict[str, RunState] | None = None) -> dict[str, RunState]:
    """What became of each run by now. Those that are known to have ended are not asked again."""
    paths, known = plan.paths, known or {}
    record = read_json(paths.launcher)
    alive, ordered = is_alive(record), set((record or {}).get("run_ids", ()))

    def state(run_id: str) -> RunState:
        if run_id in known and known[run_id].status in FINAL:
            return known[run_id]
        return run_state(paths.run(run_id), launcher_alive=bool(alive) and run_id in ordered)

    return {run_id: state(run_id) for run_id in plan.runs}


def _start_driver(paths: StudyPaths, order: Order) -> "subprocess.Popen[str] | None":
    """Start the process that runs the runs; None when there is nothing to run."""
    if not order.run_ids:
        return None
    with paths.launcher_log.open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "jobkit.launch.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the one who watches; it tells the driver
            env={**os.environ, "PYTHONPATH": _python_path()},
        )
    assert driver.stdin and driver.stdout
    with driver.stdin as to_driver:
        json.dump(asdict(order), to_driver)
    answer = driver.stdout.readline().strip()
    if answer == "busy":
        record = read_json(paths.launcher) or {}
        raise UsageError(
            f"{paths.folder.name} is being run by process {record.get('pid')}: wait for it, or "
            f"end it with 'python -m jobkit cancel {paths.folder.name}'"
        )
    if answer != "taken":
        raise RuntimeError(f"the launcher did not start: see {paths.launcher_log}")
    return driver


def _python_path() -> str:
    own = str(Path(__file__).parents[2])
    given = os.environ.get("PYTHONPATH")
    return own + os.pathsep + given if given else own


@dataclass
class Launch:
    """Runs that were started. Their states are read from their files."""

    plan: Plan
    run_ids: list[str]  # those that this launch starts; the plan's others were done before
    driver: "subprocess.Popen[str] | None"
    at_once: int = 1

    @property
    def folder(self) -> Path:
        """The study's folder: collect it."""
        return self.plan.paths.folder

    def states(self, known: dict[str, RunState] | None = None) -> dict[str, RunState]:
        """What became of each planned run by now."""
        return states(self.plan, known)

    def running(self) -> bool:
        """Whether something is still to be waited for."""
        return self.driver is not None and self.driver.poll() is None

    def wait(self) -> dict[str, RunState]:
        """Wait until all runs have ended; return what became of each planned run."""
        while self.running():
            time.sleep(_POLL_S)
        return self.states()

    def cancel(self) -> None:
        """End the runs and wait until nothing of them is left."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.terminate()
            self.driver.wait()


def cancel_study(paths: StudyPaths) -> bool:
    """End the launcher of a study from any process; whether there was one here to end."""
    record = read_json(paths.launcher)
    if not record or not is_alive(record):
        return False
    os.kill(record["pid"], 15)
    while process_start(record["pid"]) == record.get("pid_start"):
        time.sleep(_POLL_S)
    return True


def not_ok(found: Iterable[RunState]) -> int:
    """How many runs did not end well."""
    return sum(state.status != "ok" for state in found)
