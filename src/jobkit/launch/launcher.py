"""launch(plan): starts the missing runs, on this machine or on Slurm; returns a handle."""

import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import Exit, UsageError, one_line
from jobkit.gpus import check_counters
from jobkit.launch import local
from jobkit.launch import slurm_options as slurm
from jobkit.launch.command import (
    LaunchRequest,
    Order,
    job_command,
    local_command,
    refuse_logs,
    shown,
)
from jobkit.launch.site import Site
from jobkit.launch.slurm_cluster import find_site
from jobkit.launch.states import States, counted, select
from jobkit.metric.pattern import pattern_of
from jobkit.outcome.state import RunState
from jobkit.permissions import check_study, closed_to_others, next_folder
from jobkit.spec.command import RUN_DIR, CommandSpec
from jobkit.spec.dataset import check_source
from jobkit.spec.study import Plan

if TYPE_CHECKING:
    from jobkit.launch.slurm_submit import SlurmRuns

_POLL_S, _MAX_PAUSE_S = 0.25, 10.0


@dataclass
class Launch:
    """A plan and its started runs. Their state is read from files, and asked of Slurm."""

    plan: Plan
    run_ids: list[str]  # started by this launch; the plan's others were complete
    site: Site | None  # None: this machine
    looks: States  # reads the state of the runs
    at_once: int | None = None
    runs: "local.LocalRuns | SlurmRuns | None" = None  # None: there was nothing to start
    notes: list[str] = field(default_factory=list)
    left: tuple[str, ...] = ()  # what Slurm did not take: the same command later submits it

    @property
    def folder(self) -> Path:
        """The study's folder, which collect() reads."""
        return self.plan.paths.folder

    def states(self) -> dict[str, RunState]:
        """The current state of each planned run."""
        return self.looks.look()

    def running(self) -> bool:
        """Whether a run still waits or runs."""
        return self.runs is not None and self.runs.running(self.looks)

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


def pause_s(took_s: float, min_s: float) -> float:
    """Seconds between two looks at the runs, of which one took so long.

    Of thousands of runs a look takes a second: a login node has other users.
    """
    return min(max(min_s, 5 * took_s), _MAX_PAUSE_S)


def launch(plan: Plan, request: LaunchRequest | None = None) -> Launch:
    """Save the plan and start its runs that are missing or not ok; return without waiting.

    On this machine a separate process runs them one after the other, and ends with this one
    unless request.detach is set; on Slurm they are submitted as arrays. Raises UsageError for a
    plan that cannot run there; then nothing was written or submitted.
    """
    request = request or LaunchRequest()
    prepared = prepare(plan, request)
    start(prepared, request)
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
        site = replace(
            site,
            gpus_per_node=site.gpus_per_node or request.gpus_per_node or plan.study.gpus_per_node,
            gpu_request=request.gpu_request or site.gpu_request,
        )
        if None not in devices and not _asks_for_gpus(site, request):
            raise UsageError(
                f"site '{site.name}' has no gpus_per_node, so no GPUs would be requested: say "
                "--gpus-per-node N (GPUs of a full node), --gpu-request none (whole nodes), or "
                "--device cpu"
            )
    _check_scripts(plan, site)
    looks = States(plan, ask)
    run_ids = select(looks.look(), request.only)
    prepared = Launch(plan, run_ids, site, looks, at_once=request.at_once, notes=notes)
    if site is None:
        _for_this_machine(prepared, request)
    elif run_ids:
        _for_slurm(prepared, request, site, ask)
    prepared.notes += _shared_words(plan)
    return prepared


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
    if match := re.search(r"%[jtaA]", path):
        what = f"has {match[0]}, which submitit replaces by numbers of the job"
    elif path != one_line(path):
        what = "has a control character, which no batch script can hold"
    else:
        return
    raise UsageError(f"{folder}: its path {what}; choose another folder with JOBKIT_LOGS")


def _check_scripts(plan: Plan, site: Site | None) -> None:
    """Raise UsageError for a Python program that is not there, before each size waits for it.

    A container, or a set-up line that changes the folder, may have what this machine has not.
    """
    if site is not None and (site.container != "none" or any("cd " in s for s in site.setup)):
        return
    for spec in plan.runs.values():
        if isinstance(spec, CommandSpec) and (script := spec.script) and not Path(script).exists():
            raise UsageError(
                f"{spec.program} {script}: no such file in {Path.cwd()}, in which the command runs"
            )


def _shared_words(plan: Plan) -> list[str]:
    """A note where all runs of a command start in one folder and none has a folder of its own."""
    commands = [spec.command for spec in plan.runs.values() if isinstance(spec, CommandSpec)]
    words = [word for command in commands for word in command]
    if len(commands) < 2 or any(RUN_DIR in word or "JOBKIT_RUN_DIR" in word for word in words):
        return []
    what = f"all {len(commands)} runs start in this folder"
    return [f"{what}: where the program writes files, say {{run_dir}}, each run's own folder"]


def _for_this_machine(prepared: Launch, request: LaunchRequest) -> None:
    local.check(prepared.plan)
    options = [f"--{name}" for name in request.options]
    options += ["--within-allocation"] * request.within_allocation
    options += ["--gpu-request"] * (request.gpu_request is not None)
    if options:
        raise UsageError(
            f"{options[0]} is an option for Slurm, but the runs start on this machine (see --site)"
        )
    prepared.at_once = request.at_once or 1
    warnings = local.warnings(prepared.plan, prepared.at_once)
    prepared.plan = replace(prepared.plan, notes=(*prepared.plan.notes, *warnings))


def _for_slurm(prepared: Launch, request: LaunchRequest, site: Site, ask: bool) -> None:
    if request.torchrun:
        raise UsageError(f"{request.torchrun[0]} is not available on Slurm")
    wanted = slurm.submission(prepared.plan, prepared.run_ids, site, request)
    limit = str(wanted.batches[0].options["time"])
    limit = f"{limit} minutes" if limit.isdigit() else limit
    hours = wanted.node_hours
    prepared.notes.append(
        f"up to {hours:.4g} node-hours, if each job uses its whole time limit ({limit})"
    )
    if request.at_once and len(wanted.batches) > 1:
        prepared.notes.append(
            f"--max-running applies to each of the {len(wanted.batches)} job arrays"
        )
    devices = {spec.planned_device for spec in prepared.plan.runs.values()}
    if devices == {None} and not _asks_for_gpus(site, request):
        prepared.notes.append(
            f"site '{site.name}' has no gpus_per_node, so no GPUs are requested: "
            "say --gpus-per-node N, or see hpc/sites/example.toml"
        )
    if request.max_node_hours is not None and hours > request.max_node_hours:
        raise UsageError(
            f"the plan may take {hours:.4g} node-hours, more than --max-node-hours "
            f"{request.max_node_hours:g}: reduce --time, --gpus or --repeats, or raise the limit"
        )
    if ask:
        from jobkit.launch import slurm_submit  # imports submitit, which --help does not need

        slurm_submit.check(wanted)


def _asks_for_gpus(site: Site, request: LaunchRequest) -> bool:
    """Whether GPUs are asked for, or it was said that none need be."""
    options = {**slurm.verbatim(site.sbatch), **request.options}
    return bool(site.gpus_per_node or site.gpu_request == "none" or slurm.asks_for_gpus(options))


@closed_to_others()
def start(prepared: Launch, request: LaunchRequest) -> None:
    """Save the plan and start what was prepared. Raises UsageError while another launch is on."""
    plan = prepared.plan
    prepared.looks = States(plan)  # runs that had ended begin again
    if prepared.run_ids:
        if os.path.lexists(plan.paths.launcher_lock):  # else nothing holds it, and none is made
            with local.held(plan.paths):
                pass
        if prepared.site is None:
            local.refuse_orphans(plan.paths)
    try:
        plan.save()
    except OSError as error:
        raise UsageError(
            f"{plan.paths.folder}: cannot be written ({error.strerror}); "
            "choose another folder for logs with JOBKIT_LOGS"
        ) from None
    if prepared.run_ids and prepared.site is None:
        order = Order(
            folder=str(prepared.folder),
            run_ids=prepared.run_ids,
            at_once=prepared.at_once or 1,
            parent=None if request.detach else os.getpid(),
            more=request.local_words(),
        )
        prepared.runs = local.start(plan, order)
    elif prepared.run_ids:
        from jobkit.launch import slurm_submit

        with local.held(plan.paths):
            # Another launcher may have submitted some of them since we looked.
            prepared.run_ids = select(States(plan).look(), request.only)
            if prepared.run_ids:
                assert prepared.site is not None
                wanted = slurm.submission(plan, prepared.run_ids, prepared.site, request)
                runs, prepared.left, note = slurm_submit.start(wanted, request.collect)
                prepared.runs, prepared.notes = runs, [*prepared.notes, *filter(None, [note])]


def dry_run(plan: Plan, request: LaunchRequest) -> int:
    """Print each command or batch script of a launch; write nothing."""
    prepared = prepare(plan, request, ask=False)
    for note in (*prepared.plan.notes, *prepared.notes):
        print(f"# note: {note}")
    for run_id in plan.runs:
        if run_id not in prepared.run_ids:
            print(f"# {run_id}: not started again")
    if prepared.site is None:
        for run_id in prepared.run_ids:
            folder = plan.paths.run(run_id).folder
            command = local_command(plan.runs[run_id], folder, request.local_words())
            print(f"# {run_id}\n{shown(command)}")
    elif prepared.run_ids:
        _print_scripts(slurm.submission(plan, prepared.run_ids, prepared.site, request))
        if request.collect:
            print("# --- and one more job that collects and plots after all of these ---")
    print(f"# {len(prepared.run_ids)} of {counted(len(plan.runs), 'run')} would start; "
          "nothing was written")  # fmt: skip
    return Exit.OK


def _print_scripts(wanted: slurm.Submission) -> None:
    """Print each batch script, followed by the command of each of its runs."""
    from jobkit.launch.slurm_submit import script

    for batch in wanted.batches:
        folder = next_folder(wanted.study.submitit)
        text = script(batch, folder, wanted.at_once, wanted.whole)
        print(f"# --- one sbatch for {counted(len(batch.run_ids), 'run')} ---\n{text}")
        for index, run_id in enumerate(batch.run_ids):
            paths = wanted.study.run(run_id)
            spec, whole = wanted.plan.runs[run_id], wanted.whole
            command = job_command(spec, paths, whole, wanted.max_restarts)
            print(f"# {index}: {run_id}: {shown(command)}")
