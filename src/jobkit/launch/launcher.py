"""launch(plan): starts the missing runs, on this machine or on Slurm; returns a handle."""

import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from jobkit.energy import check_counters
from jobkit.errors import UsageError, one_line
from jobkit.launch import lock
from jobkit.launch.command import Order
from jobkit.launch.local import orphans
from jobkit.launch.local import start as local
from jobkit.launch.request import LaunchRequest, refuse_logs
from jobkit.launch.site import Site
from jobkit.launch.slurm import options as slurm
from jobkit.launch.slurm.cluster import find_site
from jobkit.launch.states import States, select
from jobkit.metric.pattern import pattern_of
from jobkit.outcome.state import UNDER_WAY, RunState
from jobkit.permissions import check_study, closed_to_others
from jobkit.spec.dataset import check_source
from jobkit.spec.study import Plan

_POLL_S, _LONGEST_PAUSE_S = 0.25, 10.0


class Runs(Protocol):
    """Started runs, on this machine or on Slurm."""

    @property
    def where(self) -> str: ...

    def running(self, states: States) -> bool: ...

    def cancel(self) -> None: ...


@dataclass
class Launch:
    """A plan and its started runs. Their state is read from files, and asked of Slurm."""

    plan: Plan
    run_ids: list[str]  # started by this launch; the plan's others were complete
    site: Site | None  # None: this machine
    at_once: int | None = None
    runs: Runs | None = None  # None: there was nothing to start
    notes: list[str] = field(default_factory=list)
    left: tuple[str, ...] = ()  # what Slurm did not take: the same command later submits it

    def __post_init__(self) -> None:
        self._states = States(self.plan)

    @property
    def folder(self) -> Path:
        """The study's folder, which collect() reads."""
        return self.plan.paths.folder

    def states(self) -> dict[str, RunState]:
        """The current state of each planned run."""
        return self._states.look()

    def running(self) -> bool:
        """Whether a run still waits or runs."""
        return self.runs is not None and self.runs.running(self._states)

    def wait(self) -> dict[str, RunState]:
        """Wait until all runs have ended; return the state of each planned run."""
        begin = time.monotonic()
        while self.running():
            time.sleep(pause_s(time.monotonic() - begin, _POLL_S))
            begin = time.monotonic()
        return self.states()

    def cancel(self) -> None:
        """End the runs and wait until none of their processes or jobs is left."""
        if self.runs is not None:
            self.runs.cancel()


def pause_s(took_s: float, least_s: float) -> float:
    """Seconds between two looks at the runs, of which one took so long.

    Of thousands of runs a look takes a second: a login node has other users.
    """
    return min(max(least_s, 5 * took_s), _LONGEST_PAUSE_S)


@closed_to_others()
def launch(plan: Plan, request: LaunchRequest | None = None) -> Launch:
    """Save the plan and start its runs that are missing or not ok; return without waiting.

    On this machine a separate process runs them one after the other, and ends with this one
    unless request.detach is set; on Slurm they are submitted as arrays. Raises UsageError for a
    plan that cannot run there; then nothing was written or submitted.
    """
    request = request or LaunchRequest()
    prepared = prepare(plan, request)
    if prepared.run_ids:
        lock.check_free(prepared.plan.paths)
        if prepared.site is None:
            orphans.refuse(plan.paths)
    save(prepared.plan)
    if prepared.run_ids and prepared.site is None:
        prepared.runs = _start_here(prepared, request)
    elif prepared.run_ids:
        with lock.held(prepared.plan.paths):
            # Another launcher may have submitted some of them since we looked.
            states = States(plan)
            prepared.run_ids = select(states.look(), request.only)
            if prepared.run_ids:
                _start_on_slurm(prepared, request)
    return prepared


def prepare(plan: Plan, request: LaunchRequest, ask: bool = True) -> Launch:
    """Return what a launch would start, and where, after its checks; writes and submits nothing.

    ask: Slurm may be asked; a dry run calls none of its commands.
    """
    if request.at_once is not None and request.at_once < 1:
        raise UsageError(f"--max-running {request.at_once}: must be 1 or more")
    check_counters(os.environ)  # the runs get it
    _check_path(plan.paths.folder)
    refuse_logs(plan.paths)
    notes = check_study(plan.paths.folder)
    for data in {spec.data for spec in plan.runs.values() if spec.data is not None}:
        check_source(data)
    _check_pattern(plan)
    site = find_site(request.site, ask)
    devices = {spec.planned_device for spec in plan.runs.values()}
    if site is not None and devices != {"cpu"}:
        site = request.on(site, plan.study.gpus_per_node)
        _check_gpus(site, request, devices)
    found = States(plan, ask).look()
    run_ids = select(found, request.only)
    made = Launch(plan=plan, run_ids=run_ids, site=site, at_once=request.at_once, notes=notes)
    if site is None:
        _for_this_machine(made, request)
    else:
        _for_slurm(made, request, site, ask)
    return made


def _check_pattern(plan: Plan) -> None:
    """Raise UsageError where the study's pattern is none, or does not say what its lines cover."""
    spec = next(iter(plan.runs.values()))  # one study, one pattern
    try:
        pattern_of(spec, new=True)
    except UsageError as error:
        if not getattr(spec, "patterns", None):
            raise  # it names the pattern's file
        raise UsageError(f"study {plan.study.name}: [patterns]: {error}") from None


def _check_path(folder: Path) -> None:
    """Raise UsageError for a folder whose path a job script or submitit would misread."""
    path = str(folder.absolute())
    if found := re.search(r"%[jtaA]", path):
        what = f"has {found[0]}, which submitit replaces by numbers of the job"
    elif path != one_line(path):
        what = "has a control character, which no batch script can hold"
    else:
        return
    raise UsageError(f"{folder}: its path {what}; choose another folder with JOBKIT_LOGS")


def _for_this_machine(made: Launch, request: LaunchRequest) -> None:
    local.check(made.plan)
    given = [f"--{name}" for name in request.options]
    given += ["--within-allocation"] * request.within_allocation
    given += ["--gpu-request"] * (request.gpu_request is not None)
    if given:
        raise UsageError(
            f"{given[0]} is an option for Slurm, but the runs start on this machine (see --site)"
        )
    made.at_once = request.at_once or 1
    found = local.warnings(made.plan, made.at_once)
    made.plan = replace(made.plan, notes=(*made.plan.notes, *found))


def _for_slurm(made: Launch, request: LaunchRequest, site: Site, ask: bool) -> None:
    if not made.run_ids:
        return
    if request.torchrun:
        raise UsageError(f"{request.torchrun[0]} is not available on Slurm")
    wanted = slurm.submission(made.plan, made.run_ids, site, request)
    hours = slurm.node_hours(wanted)
    made.notes += _slurm_notes(made, request, wanted, hours)
    if request.max_node_hours is not None and hours > request.max_node_hours:
        raise UsageError(
            f"the plan may take {hours:.4g} node-hours, more than --max-node-hours "
            f"{request.max_node_hours:g}: reduce --time, --gpus or --repeats, or raise the limit"
        )
    if ask:
        from jobkit.launch.slurm import submit  # imports submitit, which --help does not need

        submit.check(wanted)


def _slurm_notes(
    made: Launch, request: LaunchRequest, wanted: slurm.Submission, hours: float
) -> list[str]:
    """What a user should know before the jobs are submitted."""
    limit = wanted.batches[0].options["time"]
    limit = f"{limit} minutes" if str(limit).isdigit() else str(limit)
    notes = [f"up to {hours:.4g} node-hours, if each job uses its whole time limit ({limit})"]
    if request.at_once and len(wanted.batches) > 1:
        notes.append(f"--max-running applies to each of the {len(wanted.batches)} job arrays")
    site, devices = wanted.site, {s.planned_device for s in made.plan.runs.values()}
    if devices == {None} and not _asks(site, request):
        notes.append(
            f"site '{site.name}' has no gpus_per_node, so no GPUs are requested: "
            "say --gpus-per-node N, or see hpc/sites/example.toml"
        )
    return notes


def _asks(site: Site, request: LaunchRequest) -> bool:
    """Whether GPUs are asked for, or it was said that none need be."""
    given = {**slurm.verbatim(site.sbatch), **request.options}
    return bool(site.gpus_per_node or site.gpu_request == "none" or slurm.asks_for_gpus(given))


def _check_gpus(site: Site, request: LaunchRequest, devices: set[str | None]) -> None:
    """Raise UsageError for a training that would run on CPUs because nobody asked for GPUs."""
    if None not in devices and not _asks(site, request):
        raise UsageError(
            f"site '{site.name}' has no gpus_per_node, so no GPUs would be requested: say "
            "--gpus-per-node N (GPUs of a full node), --gpu-request none (whole nodes), or "
            "--device cpu"
        )


def save(plan: Plan) -> None:
    """Write plan.json. Raises UsageError where that is not possible."""
    try:
        plan.save()
    except OSError as error:
        raise UsageError(
            f"{plan.paths.folder}: cannot be written ({error.strerror}); "
            "choose another folder for logs with JOBKIT_LOGS"
        ) from None


def _start_here(made: Launch, request: LaunchRequest) -> Runs:
    order = Order(
        folder=str(made.folder),
        run_ids=made.run_ids,
        at_once=made.at_once or 1,
        parent=None if request.detach else os.getpid(),
        more=request.local_words(),
    )
    return local.start(made.plan.paths, order)


def _start_on_slurm(made: Launch, request: LaunchRequest) -> None:
    from jobkit.launch.slurm import jobs

    assert made.site is not None
    wanted = slurm.submission(made.plan, made.run_ids, made.site, request)
    made.runs, made.left, note = jobs.start(wanted, request.collect)
    made.notes += [note] if note else []


def under_way(found: dict[str, RunState]) -> bool:
    """Whether a run waits or runs."""
    return any(state.status in UNDER_WAY for state in found.values())
