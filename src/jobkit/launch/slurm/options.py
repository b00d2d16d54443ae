"""The options of sbatch for runs on a site: pure, no command is called here."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site, minutes
from jobkit.launch.slurm.cluster import max_array_size
from jobkit.paths import StudyPaths
from jobkit.requeue import WARNING_S
from jobkit.spec.runspec import PlannedRun
from jobkit.spec.study import Plan

Options = dict[str, str | bool]

# Options of run_benchmarks.py that sbatch knows by the same name.
OVERRIDES: dict[str, tuple[str | None, str]] = {
    "partition": ("-p", "partition"),
    "account": ("-A", "account to charge"),
    "qos": ("-q", "quality of service"),
    "time": ("-t", "time limit of one run, as 30 (minutes) or 01:30:00"),
    "constraint": ("-C", "required node features"),
    "reservation": (None, "reservation to use"),
    "nodelist": ("-w", "required nodes"),
    "exclude": ("-x", "excluded nodes"),
    "mem": (None, "memory per node"),
    "gres": (None, "as sbatch takes it, as gpu:4, in place of the site's request for GPUs"),
    "gpus-per-task": (None, "likewise"),
    "cpus-per-task": ("-c", "cores per rank"),
    "begin": (None, "earliest start time"),
    "comment": (None, "job comment"),
    "dependency": ("-d", "dependency on other jobs, as sbatch takes it"),
    "mail-type": (None, "events to send mail for"),
    "mail-user": (None, "recipient of the mail"),
}
_GPU_REQUESTS = {"gres", "gpus", "gpus-per-node", "gpus-per-task"}
_OWN = ("nodes", "ntasks", "ntasks-per-node", "array", "output", "error", "job-name", "wrap")
_WARNED_FROM_MIN = 5
# A signal to the whole job is meant for the run, which gets it too: the batch shell ignores it.
_SETUP = ["trap : USR1 USR2"]
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Shape:
    """The size of an allocation. All elements of an array have the same."""

    nodes: int
    ranks_per_node: int
    whole_node: bool = False  # a process drives all GPUs of its node

    def gpus(self, site: Site) -> int:
        """GPUs per node."""
        return site.gpus_per_node or 0 if self.whole_node else self.ranks_per_node


@dataclass(frozen=True)
class Batch:
    """Runs of one shape, submitted as one array; as several where the cluster takes fewer."""

    shape: Shape
    run_ids: tuple[str, ...]
    options: Options


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The batches of a launch and how they are submitted."""

    plan: Plan
    batches: Sequence[Batch]
    site: Site
    at_once: int | None = None  # concurrent elements of an array
    whole: bool = False  # all runs in one allocation, one after the other
    max_restarts: int | None = None  # of one job (None: run.sh's own default)

    @property
    def study(self) -> StudyPaths:
        return self.plan.paths


def submission(
    plan: Plan, run_ids: Sequence[str], site: Site, request: LaunchRequest
) -> Submission:
    """The submission of the runs, the same for a dry run and a real launch."""
    if request.within_allocation:
        shape = largest(plan, run_ids)
        options = sbatch_options(shape, site, request.options, plan.study.name)
        if "time" not in request.options:  # the site's limit is for one run
            options["time"] = str(math.ceil(minutes(site.time) * len(run_ids)))
        whole = [Batch(shape, tuple(run_ids), options)]
        options |= warning(options, _stop_signal(plan, run_ids))
        return Submission(
            plan=plan, batches=whole, site=site, whole=True, max_restarts=request.max_restarts
        )
    made = batches(plan, run_ids, site, request.options)
    return Submission(
        plan=plan,
        batches=made,
        site=site,
        at_once=request.at_once,
        max_restarts=request.max_restarts,
    )


def shape_of(spec: PlannedRun) -> Shape:
    """The allocation that a run needs."""
    return Shape(spec.nodes, spec.ranks_per_node, spec.whole_node)


def batches(plan: Plan, run_ids: Sequence[str], site: Site, given: Options) -> list[Batch]:
    """The runs by shape, the small shapes first, each with sbatch's options.

    Raises UsageError for a run with more ranks per node than the site has GPUs.
    """
    shapes: dict[Shape, list[str]] = {}
    for run_id in run_ids:
        shapes.setdefault(shape_of(plan.runs[run_id]), []).append(run_id)
    signal = _stop_signal(plan, run_ids)
    order = sorted(shapes, key=lambda s: (s.nodes * s.ranks_per_node, s.nodes))
    most = max_array_size()
    return [
        Batch(shape, tuple(shapes[shape][begin : begin + most]), options | warning(options, signal))
        for shape in order
        for options in [sbatch_options(shape, site, given, _job_name(plan, shapes[shape], shape))]
        for begin in range(0, len(shapes[shape]), most)
    ]


def _job_name(plan: Plan, run_ids: Sequence[str], shape: Shape) -> str:
    """What squeue shows of an array: its program or strategy, else the study, and its size."""
    names = {str(plan.runs[run_id].columns()["strategy"]) for run_id in run_ids}
    return _sized(names.pop() if len(names) == 1 else plan.study.name, shape)


def _sized(name: str, shape: Shape) -> str:
    return f"{name}-n{shape.nodes}-g{shape.ranks_per_node}"


def job_names(plan: Plan) -> set[str]:
    """The names that a job of this plan may have."""
    study, shapes = plan.study.name, {shape_of(spec) for spec in plan.runs.values()}
    names = {_job_name(plan, [run_id], shape_of(spec)) for run_id, spec in plan.runs.items()}
    return {study, f"{study}-collect", *names, *(_sized(study, shape) for shape in shapes)}


def largest(plan: Plan, run_ids: Sequence[str]) -> Shape:
    """The smallest allocation in which each of the runs fits."""
    specs = [plan.runs[run_id] for run_id in run_ids]
    whole_node = any(shape_of(s).whole_node for s in specs)
    return Shape(max(s.nodes for s in specs), max(s.ranks_per_node for s in specs), whole_node)


def sbatch_options(shape: Shape, site: Site, given: Options, name: str) -> Options:
    """All options of one sbatch call: the site's, overridden by the user's."""
    if site.gpus_per_node and shape.ranks_per_node > site.gpus_per_node:
        raise UsageError(
            f"{shape.ranks_per_node} GPUs on a node: site '{site.name}' has {site.gpus_per_node}; "
            f"use more nodes, as --gpus {shape.nodes * shape.ranks_per_node} with "
            f"--gpus-per-node {site.gpus_per_node}"
        )
    options: Options = {
        "job-name": name,
        "nodes": str(shape.nodes),
        "ntasks-per-node": str(shape.ranks_per_node),
        "time": site.time,
    }
    for key in ("partition", "account", "qos", "constraint", "reservation", "mem"):
        if value := getattr(site, key):
            options[key] = value
    if site.cpus_per_task:
        options["cpus-per-task"] = str(site.cpus_per_task)
    if site.exclusive:
        options["exclusive"] = True
    if not asks_for_gpus(given):
        options |= gpu_options(shape, site)
    options |= verbatim(site.sbatch)
    options |= given
    for key, value in options.items():
        if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f]", value):
            raise UsageError(f"--{key} {value!r}: has a control character")
    minutes(str(options["time"]))
    return options


def warning(options: Options, stop_signal: str) -> Options:
    """The options for a signal before the time limit and for requeueing, where not given.

    A limit of a few minutes leaves no time: Slurm may send the signal a minute early, which could
    be at the start. submitit always asks for a signal; CONT does nothing.
    """
    short = minutes(str(options["time"])) < _WARNED_FROM_MIN
    found: Options = {"signal": "CONT@1" if short else f"{stop_signal}@{WARNING_S}"}
    if "no-requeue" not in options:
        found["requeue"] = True
    return {key: value for key, value in found.items() if key not in options}


def _stop_signal(plan: Plan, run_ids: Sequence[str]) -> str:
    """The signal on which the runs save and end. Raises UsageError where they differ."""
    signals = {plan.runs[run_id].stop_signal for run_id in run_ids}
    if len(signals) > 1:
        raise UsageError("stop_signal: must be the same for all runs of a study")
    return next(iter(signals))


def gpu_options(shape: Shape, site: Site) -> Options:
    """The site's options to request one GPU per rank, or for dp all GPUs of the node."""
    if not site.gpus_per_node or site.gpu_request == "none":
        return {}
    kind = f"{site.gpu_type}:" if site.gpu_type else ""
    if site.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{shape.gpus(site)}"}
    if site.gpu_request == "gpus-per-task":
        return {"gpus-per-task": f"{kind}{max(1, shape.gpus(site) // shape.ranks_per_node)}"}
    return {"gpus-per-node": f"{kind}{shape.gpus(site)}"}


def asks_for_gpus(options: Options) -> bool:
    """Whether options of sbatch ask for GPUs."""
    return bool(_GPU_REQUESTS & options.keys())


def verbatim(words: Sequence[str]) -> Options:
    """Options of sbatch from a site or --sbatch: --key=value, --key value, or --flag.

    Raises UsageError for a word that is no option, or an option that jobkit sets itself.
    """
    options: Options = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        match = _OPTION.fullmatch(word)
        if not match:
            raise UsageError(f"'{word}': write options of sbatch in their long form, --key=value")
        key, value = match[1], match[2]
        if key in _OWN:
            raise UsageError(f"--{key}: jobkit sets this itself, from --gpus and --name")
        if value is None and waiting and not waiting[0].startswith("-"):
            value = waiting.pop(0)
        options[key] = True if value is None else value
    return options


def node_hours(wanted: Submission) -> float:
    """Node-hours of all jobs if each uses its whole time limit."""
    return sum(
        _node_hours(b.options, 1 if wanted.whole else len(b.run_ids)) for b in wanted.batches
    )


def _node_hours(options: Options, jobs: int) -> float:
    return jobs * int(str(options["nodes"])) * minutes(str(options["time"])) / 60


def output_file(path: Path) -> str:
    """A file's path as --output takes it: Slurm would replace %j, %n and others in it."""
    return str(path).replace("%", "%%")


def submitit_parameters(options: Options, at_once: int | None) -> dict[str, Any]:
    """The options as parameters of submitit's executor.

    All are additional parameters: with its own ones for nodes and tasks, submitit would wait for
    a result from every task. Its defaults that do not fit are overridden or left out.
    """
    more = dict(options)
    return {
        "job_name": more.pop("job-name"),
        "additional_parameters": more,
        "use_srun": False,
        "wckey": None,
        "array_parallelism": at_once or 1000,
        "stderr_to_stdout": True,
        "setup": _SETUP,
    }
