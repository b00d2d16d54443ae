"""launch(plan): starts the missing runs, on this machine or on Slurm; returns a handle."""

import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jobkit.errors import Exit, UsageError, has_control
from jobkit.launch import local, slurm_cluster
from jobkit.launch import slurm_options as slurm
from jobkit.launch.command import LaunchRequest, job_command, local_command, refuse_logs
from jobkit.launch.site import Site
from jobkit.launch.start import MAX_RESTARTS
from jobkit.launch.states import States, counted, select, wait_for_end
from jobkit.metric.pattern import load_pattern
from jobkit.outcome.state import RunState
from jobkit.paths import read_json
from jobkit.permissions import check_study, closed_to_others, next_folder
from jobkit.spec.command import RUN_DIR, CommandSpec
from jobkit.spec.dataset import absence, check_source
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan

_POLL_S, _MAX_PAUSE_S = 0.25, 10.0


@dataclass
class Launch:
    """A plan and its started runs. Their state is read from files, and asked of Slurm."""

    plan: Plan
    request: LaunchRequest
    run_ids: list[str]  # started by this launch; the plan's others were complete
    site: Site | None  # None: this machine
    looks: States  # reads the state of the runs
    batches: Sequence[slurm.Batch] = ()  # what is submitted to Slurm
    driver: "subprocess.Popen[str] | None" = None  # on this machine: what runs the runs
    jobs: list[str] = field(default_factory=list)  # on Slurm: their ids
    notes: list[str] = field(default_factory=list)
    left: tuple[str, ...] = ()  # what Slurm did not take: the same command later submits it

    @property
    def folder(self) -> Path:
        """The study's folder, which collect() reads."""
        return self.plan.paths.folder

    @property
    def at_once(self) -> int | None:
        """How many runs are at work at a time; None: as many as Slurm starts."""
        return 1 if self.site is None else self.request.at_once

    def states(self) -> dict[str, RunState]:
        return self.looks.look()

    @property
    def where(self) -> str:
        """Where the runs were started, for a message; empty where there was nothing to start."""
        if self.driver:
            return f"process {self.driver.pid} on this machine"
        if not self.jobs:
            return ""
        return f"Slurm job{'s' * (len(self.jobs) > 1)} {', '.join(self.jobs)}"

    def running(self) -> bool:
        """Whether a run still waits or runs; Slurm is asked again before none does."""
        if self.driver:
            return self.driver.poll() is None
        return bool(self.jobs) and (self.looks.under_way() or self.looks.under_way(fresh=True))

    def wait(self) -> dict[str, RunState]:
        """Wait until all runs have ended; return the state of each planned run."""
        begin = time.monotonic()
        while self.running():
            time.sleep(pause_s(time.monotonic() - begin, _POLL_S))
            begin = time.monotonic()
        return self.states()

    def cancel(self) -> None:
        """End the runs and wait until none of their processes or jobs is left."""
        if self.driver and self.driver.poll() is None:
            self.driver.terminate()
            self.driver.wait()
        if self.jobs:
            slurm_cluster.cancel(self.jobs)
            wait_for_end(self.plan)


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
    prepared = prepare(plan, request or LaunchRequest())
    start(prepared)
    return prepared


def prepare(plan: Plan, request: LaunchRequest) -> Launch:
    """Return what a launch would start, and where, after its checks; writes and submits nothing."""
    folder = plan.paths.folder
    if request.at_once is not None and request.at_once < 1:
        raise UsageError(f"--max-running {request.at_once}: must be 1 or more")
    if has_control(str(folder.absolute())):
        what = "has a control character; choose another folder with JOBKIT_LOGS"
        raise UsageError(f"{folder}: its path {what}")
    refuse_logs(plan.paths)
    notes = check_study(folder)
    plan = plan.continued()
    if plan.study.pattern:
        load_pattern(plan.study.pattern)  # it may not compile
    site = slurm_cluster.find_site(request.site)
    trainings = [spec for spec in plan.runs.values() if isinstance(spec, RunSpec)]
    for data, data_dir in {(spec.dataset, spec.data_dir) for spec in trainings}:
        check_source(data)
        notes += filter(None, [absence(data, data_dir)] if site else [])
    if site is not None:
        notes.append(f"site {site.name} ({site.source or 'no profile in hpc/sites: the defaults'})")
    if site is not None and {spec.device for spec in plan.runs.values()} != {"cpu"}:
        site = replace(
            site,
            gpus_per_node=site.gpus_per_node or request.gpus_per_node or plan.study.gpus_per_node,
            gpu_request=request.gpu_request or site.gpu_request,
        )
    looks = States(plan)
    prepared = Launch(plan, request, select(looks.look()), site, looks, notes=notes)
    commands = [spec for spec in plan.runs.values() if isinstance(spec, CommandSpec)]
    _check_scripts(commands, site)
    if site is None:
        _check_here(prepared)
    else:
        _check_slurm(prepared, site)
    prepared.notes += _of_other_programs(prepared)
    words = [word for spec in commands for word in spec.command]
    if len(commands) > 1 and not any(RUN_DIR in w or "JOBKIT_RUN_DIR" in w for w in words):
        what = f"all {len(commands)} runs start in this folder"
        text = f"{what}: where the program writes files, say {{run_dir}}, each run's own folder"
        prepared.notes.append(text)
    if "unit" in plan.study.work and not ("per_step" in plan.study.work or plan.study.pattern):
        what = "rates are in steps/s, unless the program reports its work"
        prepared.notes.append(f"--unit without --work-per-step: {what}")
    return prepared


def _check_scripts(commands: Sequence[CommandSpec], site: Site | None) -> None:
    """Raise UsageError for a Python program that is not there, before each size waits for it.

    A container, or a set-up line that changes the folder, may have what this machine has not.
    """
    if site is not None and (site.container != "none" or any("cd " in s for s in site.setup)):
        return
    for spec in commands:
        if spec.script and not Path(spec.script).exists():
            where = f"no such file in {Path.cwd()}, in which the command runs"
            raise UsageError(f"{' '.join(spec.command[:2])}: {where}")


def _of_other_programs(prepared: Launch) -> list[str]:
    """A note where a program has changed since runs of it that are ok, and so are not started.

    Raises UsageError where runs are of another program of the same name.
    """
    changed = set()
    for run_id, spec in prepared.plan.runs.items():
        paths = prepared.plan.paths.run(run_id)
        if not (isinstance(spec, CommandSpec) and spec.script and paths.log.exists()):
            continue
        script, left = Path(spec.script).absolute(), read_json(paths.spec) or {}
        if left.get("script", str(script)) != str(script):
            of = f"is of another program, {left['script']}"
            raise UsageError(f"{run_id} {of}: give another --name")
        is_kept = prepared.looks.of_runs[run_id].status == "ok"
        if is_kept and script.exists() and script.stat().st_mtime > paths.log.stat().st_mtime:
            changed.add(spec.script)
    what = "has changed since runs of it that are kept: to measure all again, another --name"
    return [f"{script} {what}" for script in sorted(changed)]


def _check_here(prepared: Launch) -> None:
    """Check a launch on this machine, and warn of too few cores or GPUs."""
    plan, request = prepared.plan, prepared.request
    local.check(plan)
    options = [f"--{name}" for name in request.options]
    options += ["--within-allocation"] * request.within_allocation
    options += ["--max-running"] * ((request.at_once or 1) > 1)
    options += ["--gpu-request"] * (request.gpu_request is not None)
    if options:
        where = "but the runs start on this machine (see --site)"
        raise UsageError(f"{options[0]} is an option for Slurm, {where}")
    prepared.plan = replace(plan, notes=(*plan.notes, *local.warnings(plan)))


def _check_slurm(prepared: Launch, site: Site) -> None:
    """Make the batches of a launch on Slurm, check them, and note what they may cost."""
    plan, request, notes = prepared.plan, prepared.request, prepared.notes
    if "%" in str(prepared.folder.absolute()):  # Slurm and submitit would read it as a pattern
        what = "has a %; choose another folder with JOBKIT_LOGS"
        raise UsageError(f"{prepared.folder}: its path {what}")
    devices = {spec.device for spec in plan.runs.values()}
    options = {**slurm.verbatim(site.sbatch), **request.options}
    asked = site.gpus_per_node or site.gpu_request == "none" or slurm.GPU_OPTIONS & options.keys()
    if devices != {"cpu"} and not asked:
        what = f"site '{site.name}' has no gpus_per_node, so no GPUs"
        if None not in devices:
            say = "say --gpus-per-node N (GPUs of a full node), --gpu-request none (whole nodes)"
            raise UsageError(f"{what} would be requested: {say}, or --device cpu")
        say = "say --gpus-per-node N, or see hpc/sites/example.toml"
        notes.append(f"{what} are requested: {say}")
    if not prepared.run_ids:
        return
    if unused := [name for name in os.environ if name.startswith("SBATCH_")]:
        how = "as an option (--help-slurm) or in the site's profile"
        notes.append(f"{', '.join(unused)} of the environment has no effect: say it {how}")
    prepared.batches = slurm.make_batches(plan, prepared.run_ids, site, request)
    hours = sum(batch.node_hours for batch in prepared.batches)
    limit = str(prepared.batches[0].options["time"])
    limit = counted(int(limit), "minute") if limit.isdigit() else limit
    note = f"up to {hours:.4g} node-hours, if each job uses its whole time limit ({limit})"
    restarts = MAX_RESTARTS if request.max_restarts is None else request.max_restarts
    if restarts and "no-requeue" not in options:
        again = f"requeued {counted(restarts, 'time')} (--max-restarts)"
        note += f", or {hours * (1 + restarts):.4g} if each is also {again}"
    notes.append(note)


@closed_to_others()
def start(prepared: Launch) -> None:
    """Save the plan and start what was prepared. Raises UsageError while another launch is on."""
    plan, request, paths = prepared.plan, prepared.request, prepared.plan.paths
    prepared.looks = States(plan)  # runs that had ended begin again
    if prepared.run_ids and os.path.lexists(paths.launcher_lock):  # else nothing holds it
        with local.held(paths):
            pass
    if prepared.batches:
        from jobkit.launch import slurm_submit  # imports submitit, which --help does not need

        slurm_submit.check(paths, prepared.batches)
    if prepared.run_ids and prepared.site is None:
        local.prepare_data(plan, prepared.run_ids)
    try:
        plan.save()
    except OSError as error:
        other = "choose another folder for logs with JOBKIT_LOGS"
        why = f"{paths.folder}: cannot be written ({error.strerror}); {other}"
        raise UsageError(why) from None
    if prepared.run_ids and prepared.site is None:
        prepared.driver = local.start(plan, prepared.run_ids, request)
    elif prepared.site is not None and prepared.batches:
        with local.held(paths):
            # Another launcher may have submitted some of them since we looked.
            prepared.run_ids = select(States(plan).look())
            if prepared.run_ids:
                batches = slurm.make_batches(plan, prepared.run_ids, prepared.site, request)
                done = slurm_submit.submit(plan, batches, prepared.site, request.max_restarts)
                prepared.jobs, prepared.left, note = done
                prepared.notes += [note] if note else []


def dry_run(plan: Plan, request: LaunchRequest) -> int:
    """Print each command or batch script of a launch; write nothing."""
    prepared = prepare(plan, request)
    plan = prepared.plan
    for note in (*plan.notes, *prepared.notes):
        print(f"# note: {note}")
    for run_id in plan.runs:
        if run_id not in prepared.run_ids:
            print(f"# {run_id}: not started again")
    if prepared.site is None:
        for run_id in prepared.run_ids:
            spec, folder = plan.runs[run_id], plan.paths.run(run_id).folder
            print(f"# {run_id}\n{shlex.join(local_command(spec, folder, request.max_restarts))}")
    for batch in prepared.batches:
        from jobkit.launch.slurm_submit import script

        text = script(batch, next_folder(plan.paths.submitit))
        print(f"# --- one sbatch for {counted(len(batch.run_ids), 'run')} ---\n{text}")
        for index, run_id in enumerate(batch.run_ids):
            spec, paths = plan.runs[run_id], plan.paths.run(run_id)
            command = job_command(spec, paths, batch.whole, request.max_restarts)
            print(f"# {index}: {run_id}: {shlex.join(command)}")
    would = f"{len(prepared.run_ids)} of {counted(len(plan.runs), 'run')} would start"
    print(f"# {would}; nothing was written")
    return Exit.OK
