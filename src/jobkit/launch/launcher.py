"""launch(plan): start what is missing, here or on Slurm, and a handle on it."""

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from jobkit.errors import UsageError
from jobkit.launch import lock
from jobkit.launch.command import Order, shown
from jobkit.launch.local import start as local
from jobkit.launch.request import How
from jobkit.launch.site import Site
from jobkit.launch.slurm import options as slurm
from jobkit.launch.slurm.cluster import find_site
from jobkit.launch.states import States, select
from jobkit.outcome.status import UNDER_WAY, RunState
from jobkit.permissions import closed_to_others, other_writers
from jobkit.spec.dataset import check_source
from jobkit.spec.plan import Plan

_POLL_S = 0.25


class Runs(Protocol):
    """Runs that were started somewhere."""

    @property
    def where(self) -> str: ...

    def running(self, states: States) -> bool: ...

    def cancel(self) -> None: ...


@dataclass
class Launch:
    """A plan and what was started of it. Its state is read from files, and asked of Slurm."""

    plan: Plan
    run_ids: list[str]  # those that this launch starts; the plan's others were done before
    site: Site | None  # None: this machine
    at_once: int | None = None
    runs: Runs | None = None  # None: there was nothing to start
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._states = States(self.plan)

    @property
    def folder(self) -> Path:
        """The study's folder: collect it."""
        return self.plan.paths.folder

    def states(self) -> dict[str, RunState]:
        """What became of each planned run by now."""
        return self._states.look()

    def running(self) -> bool:
        """Whether something is still to be waited for."""
        return self.runs is not None and self.runs.running(self._states)

    def wait(self) -> dict[str, RunState]:
        """Wait until all runs have ended; return what became of each planned run."""
        while self.running():
            time.sleep(_POLL_S)
        return self.states()

    def cancel(self) -> None:
        """End the runs and wait until nothing of them is left."""
        if self.runs is not None:
            self.runs.cancel()


@closed_to_others()
def launch(plan: Plan, how: How | None = None) -> Launch:
    """Save the plan and start its runs that are missing or not ok; return at once.

    On this machine a process of its own runs them, one after the other, and ends with this one
    unless how.detach is set; on Slurm they are submitted as arrays. Raises UsageError for a plan
    that cannot run there; then nothing was written or submitted.
    """
    how = how or How()
    prepared = prepare(plan, how)
    if prepared.run_ids:
        lock.check_free(prepared.plan.paths)
    save(prepared.plan)
    if prepared.run_ids and prepared.site is None:
        prepared.runs = _start_here(prepared, how)
    elif prepared.run_ids:
        with lock.held(prepared.plan.paths):
            # Another launcher may have submitted some of them since we looked.
            prepared.run_ids = select(States(plan).look(), how.only)
            prepared.runs = _start_on_slurm(prepared, how)
    return prepared


def prepare(plan: Plan, how: How, ask: bool = True) -> Launch:
    """Decide where and what to start, and check it; writes and submits nothing.

    ask: Slurm may be asked; a dry run calls none of its commands.
    """
    if how.at_once is not None and how.at_once < 1:
        raise UsageError(f"--max-running {how.at_once}: must be 1 or more")
    whose = other_writers(plan.paths.folder)
    advice = f"{plan.paths.folder}: {whose} may write into it, and what lies there is executed"
    if whose == "everybody":
        raise UsageError(f"{advice}: say chmod -R go-w {shown([str(plan.paths.folder)])}")
    for dataset in {spec.dataset for spec in plan.runs.values()}:
        check_source(dataset)
    site = find_site(how.site, ask)
    found = States(plan, ask).look()
    made = Launch(plan=plan, run_ids=select(found, how.only), site=site, at_once=how.at_once)
    if whose:
        made.notes.append(advice)
    if site is None:
        _for_this_machine(made, how)
    else:
        _for_slurm(made, how, site, ask)
    return made


def _for_this_machine(made: Launch, how: How) -> None:
    local.check(made.plan)
    if how.options or how.within_allocation:
        said = [f"--{name}" for name in how.options] or ["--within-allocation"]
        raise UsageError(f"{said[0]} is for Slurm, and this runs on this machine (--site)")
    made.at_once = how.at_once or 1
    made.plan = replace(made.plan, notes=(*made.plan.notes, *local.warnings(made.plan)))


def _for_slurm(made: Launch, how: How, site: Site, ask: bool) -> None:
    if not made.run_ids:
        return
    if how.torchrun:
        raise UsageError(f"{how.torchrun[0]} is for runs on this machine, and this is for Slurm")
    wanted = slurm.submission(made.plan, made.run_ids, site, how)
    hours = slurm.node_hours(wanted)
    limit = wanted.batches[0].options["time"]
    made.notes.append(f"up to {hours:.4g} node-hours, if each job takes its whole limit ({limit})")
    if how.at_once and len(wanted.batches) > 1:
        made.notes.append(
            f"--max-running counts within a node shape: there are {len(wanted.batches)}"
        )
    if not site.gpus_per_node and any(s.device != "cpu" for s in made.plan.runs.values()):
        made.notes.append(
            f"site '{site.name}' has no gpus_per_node, so no GPUs are asked for: "
            "see hpc/sites/example.toml, or say --device cpu"
        )
    if how.max_node_hours is not None and hours > how.max_node_hours:
        raise UsageError(
            f"the plan may take {hours:.4g} node-hours, more than --max-node-hours "
            f"{how.max_node_hours:g}: lower --time, --gpus or --repeats, or allow more"
        )
    if ask:
        from jobkit.launch.slurm import submit  # imports submitit, which a dry run can do without

        submit.check(wanted)


def save(plan: Plan) -> None:
    """Write plan.json; UsageError where that cannot be."""
    try:
        plan.save()
    except OSError as error:
        raise UsageError(
            f"{plan.paths.folder}: cannot be written ({error.strerror}); "
            "choose another place for logs with JOBKIT_LOGS"
        ) from None


def _start_here(made: Launch, how: How) -> Runs:
    order = Order(
        folder=str(made.folder),
        run_ids=made.run_ids,
        at_once=made.at_once or 1,
        parent=None if how.detach else os.getpid(),
        more=how.local_words(),
    )
    return local.start(made.plan.paths, order)


def _start_on_slurm(made: Launch, how: How) -> Runs | None:
    from jobkit.launch.slurm.jobs import start

    assert made.site is not None
    if not made.run_ids:
        return None
    runs, note = start(slurm.submission(made.plan, made.run_ids, made.site, how), how.collect)
    made.notes += [note] if note else []
    return runs


def under_way(found: dict[str, RunState]) -> bool:
    """Whether a run waits or runs."""
    return any(state.status in UNDER_WAY for state in found.values())
